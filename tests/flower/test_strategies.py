"""Flower's strategies with two more lines: what they see, what travels, and what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedProx,
)
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

import laconic
from laconic.core.errors import SpecError, StateError, WireError
from laconic.federated.flower.strategy import Compressed
from laconic.federated.rounds import simulate
from laconic.federated.samplings.constant import Constant
from laconic.federated.server import Server
from tests.flower.flower_world import MemoryGrid, app, nodes, tensors_of
from tests.unit.federated_world import SHAPES, equal, model, train

ALL: dict[str, Any] = {"fraction_train": 1.0, "min_train_nodes": 4, "min_available_nodes": 4}
WAYS = [
    ("dense()", None),
    ("stc(density=0.05)", "stc(density=0.05)"),
    ("dhqc(density=0.05)", None),
    ("sign()", "bf16()"),
]
STC = "stc(density=0.05)"


def flower_mean(before: dict[str, torch.Tensor], proposals: Any) -> dict[str, torch.Tensor]:
    """What FedAvg makes of the replies, with Flower's own function, and integers rounded."""
    records = [
        RecordDict({"arrays": ArrayRecord(tensors), "metrics": MetricRecord({"num-examples": examples})})
        for tensors, examples in proposals
    ]
    mean = tensors_of(aggregate_arrayrecords(records, "num-examples"))
    return {
        name: mean[name] if value.is_floating_point() else mean[name].round().to(value.dtype)
        for name, value in before.items()
    }


def run(strategy: Compressed, folder: Path, rounds: int = 4, **world: Any) -> tuple[Any, MemoryGrid]:
    grid = MemoryGrid(nodes(folder, **world))
    return strategy.start(grid, ArrayRecord(model()), num_rounds=rounds), grid


@pytest.mark.parametrize(
    ("up", "down", "evaluates"),
    [*((*ways, share) for ways in WAYS for share in (0.0, 1.0)), ("qsgd(levels=7)", "qsgd(levels=7)", 0.0)],
    ids=str,
)
def test_flower_and_simulate_give_the_same_bits(
    up: str, down: str | None, evaluates: float, tmp_path: Path
) -> None:
    strategy = laconic.federated.compressed(FedAvg(fraction_evaluate=evaluates, **ALL), up=up, down=down)
    result, _ = run(strategy, tmp_path)
    first = model()
    outcomes = list(
        simulate(
            first,
            train,
            Server(first, up, down),
            clients=4,
            sampling=Constant(1.0),
            rounds=4,
            aggregate=flower_mean,
        )
    )
    rounded = {
        name: value if value.dtype == first[name].dtype else value.round().to(first[name].dtype)
        for name, value in tensors_of(result.arrays).items()
    }
    assert equal(rounded, dict(outcomes[-1].model))
    if not evaluates:
        last = [each for each in strategy.traffic.rounds if each.up]
        assert [sum(each.up.values()) for each in last] == [outcome.up for outcome in outcomes]


@pytest.mark.parametrize("make", [FedAvg, FedProx, FedAdam])
def test_lossless_changes_nothing_that_a_strategy_does(make: Any, tmp_path: Path) -> None:
    seen: list[Any] = []
    plain_seen: list[Any] = []
    result, _ = run(laconic.federated.compressed(make(**ALL), up="dense()"), tmp_path, seen=seen)
    grid = MemoryGrid({node: app(node, [], plain_seen) for node in range(4)})
    plain = make(**ALL).start(grid, ArrayRecord(model()), num_rounds=4)
    ours, theirs = tensors_of(result.arrays), tensors_of(plain.arrays)
    assert list(ours) == list(theirs)
    for name in (
        *SHAPES,
        "norm.running_mean",
    ):  # W + (T - W) is T up to rounding, which FedAdam's division makes larger
        tolerance = 1e-2 if make is FedAdam else 1e-5
        assert torch.allclose(ours[name].float(), theirs[name].float(), atol=tolerance), name
    assert [each[:3] for each in sorted(seen, key=lambda each: each[:2])] == [
        each[:3] for each in sorted(plain_seen, key=lambda each: each[:2])
    ], "the same config reaches the app, FedProx's proximal-mu too"
    assert set(result.evaluate_metrics_clientapp) == {1, 2, 3, 4}
    for number, metrics in result.evaluate_metrics_clientapp.items():
        assert metrics["size"] == pytest.approx(
            plain.evaluate_metrics_clientapp[number]["size"], rel=1e-2 if make is FedAdam else 1e-5
        )


@pytest.mark.parametrize("make", [FedAvg, FedProx, FedAdam])
def test_clients_hold_what_the_server_thinks_that_they_hold(make: Any, tmp_path: Path) -> None:
    seen: list[Any] = []
    strategy = laconic.federated.compressed(make(fraction_evaluate=0.0, **ALL), up=STC, down=STC)
    run(strategy, tmp_path, rounds=5, seen=seen)
    last = [tensors for _, number, _, tensors in seen if number == 5]
    assert len(last) == 4
    assert all(equal(each, last[0]) for each in last)
    assert equal(last[0], strategy.server.public)


def test_bytes_are_those_that_flower_carries(tmp_path: Path) -> None:
    strategy = laconic.federated.compressed(FedAvg(**ALL), up=STC, down=STC)
    _, grid = run(strategy, tmp_path, rounds=6)

    def carried(messages: Any) -> int:
        records = [record for message in messages for record in message.content.array_records.values()]
        assert all(array.stype == "laconic.v1" for record in records for array in record.values())
        told = [message.content.config_records.get("laconic.form", {}) for message in messages]
        in_arrays = sum(len(array.data) for record in records for array in record.values())
        return in_arrays + sum(len(str(each["form"])) for each in told if each)

    # what came up was replaced by what the strategy sees, so it is counted before
    assert strategy.traffic.down_nbytes == carried(grid.sent)
    kinds = [dict(each.kinds) for each in strategy.traffic.rounds]
    assert kinds[0] == {"form": 4, "whole": 4}
    assert all(set(each) == {"updates"} for each in kinds[1:])
    dense = sum(value.numel() * value.element_size() for value in model().values()) * 4 * 6
    assert strategy.traffic.up_nbytes < dense / 8


def test_who_evaluates_is_not_sent_the_model_twice(tmp_path: Path) -> None:
    strategy = laconic.federated.compressed(FedAvg(**ALL), up=STC, down=None)
    _, grid = run(strategy, tmp_path, rounds=3)
    trains = [message for message in grid.sent if message.metadata.message_type == "train"]
    sizes = [len(message.content["arrays"]["laconic"].data) for message in trains]
    assert min(sizes[:4]) > 4 * max(sizes[4:]), "evaluate has brought the model of the next round"


def test_a_sampling_sets_the_share_of_each_round(tmp_path: Path) -> None:
    seen: list[Any] = []
    inner = FedAvg(fraction_evaluate=0.0, min_available_nodes=10)
    strategy = laconic.federated.compressed(inner, up=STC, sampling="falling(0.8, rate=0.5)")
    run(strategy, tmp_path, rounds=4, count=10, seen=seen)
    counts = [sum(number == each for _, number, _, _ in seen) for each in range(1, 5)]
    assert counts == [8, 4, 2, 2], "int(10 * 0.8 * exp(-0.5 r)), and two at least"
    assert inner.fraction_train == 1.0


def test_a_share_is_taken_of_nodes_that_all_have_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedAvg alone takes int(2 * 0.5) = 1 of the two early ones, then min_train_nodes = 2 of ten."""
    import laconic.federated.flower.grid as compressing

    seen: list[Any] = []
    grid = MemoryGrid(nodes(tmp_path, 10, seen))
    late = iter([2, 2, 7, 10])
    here = {"count": 2}

    def arrive(seconds: float) -> None:
        here["count"] = next(late)

    monkeypatch.setattr(compressing.time, "sleep", arrive)
    monkeypatch.setattr(grid, "get_node_ids", lambda: list(range(here["count"])))
    inner = FedAvg(fraction_train=0.5, fraction_evaluate=0.0, min_available_nodes=10)
    laconic.federated.compressed(inner).start(grid, ArrayRecord(model()), num_rounds=1)
    assert len(seen) == 5


@pytest.mark.parametrize("buffers", ["local", ["norm.running_mean", "norm.num_batches_tracked"]], ids=str)
def test_buffers_may_stay_with_each_client(buffers: Any, tmp_path: Path) -> None:
    seen: list[Any] = []
    strategy = laconic.federated.compressed(FedAvg(fraction_evaluate=0.0, **ALL), buffers=buffers)
    result, _ = run(strategy, tmp_path, rounds=2, seen=seen)
    assert torch.allclose(tensors_of(result.arrays)["norm.running_mean"], model()["norm.running_mean"])
    means = {node: each["norm.running_mean"] for node, number, _, each in seen if number == 2}
    own = {node: train(node, each, 1)[0] for node, number, _, each in seen if number == 1}
    assert all(torch.equal(means[node], own[node]["norm.running_mean"]) for node in range(4))


def test_integers_stay_integers(tmp_path: Path) -> None:
    seen: list[Any] = []
    run(laconic.federated.compressed(FedAvg(fraction_evaluate=0.0, **ALL)), tmp_path, rounds=3, seen=seen)
    counts = {number: each["norm.num_batches_tracked"] for _, number, _, each in seen}
    assert counts == {1: torch.tensor(3), 2: torch.tensor(4), 3: torch.tensor(5)}
    assert all(value.dtype == torch.int64 for value in counts.values())


def test_what_does_not_go_with_compression_is_refused(tmp_path: Path) -> None:
    compressed = laconic.federated.compressed
    with pytest.raises(SpecError, match="compressed already"):
        compressed(compressed(FedAvg()))
    with pytest.raises(SpecError, match="density must be a number"):
        compressed(FedAvg(), up="stc(density=0)")
    with pytest.raises(SpecError, match="needs all ranks at once"):
        compressed(FedAvg(), up="powersgd(rank=2)")
    with pytest.raises(SpecError, match="Strategy is expected, got dict"):
        compressed({})
    with pytest.raises(SpecError, match="sampling must be a sampling"):
        compressed(FedAvg(), sampling="dgc()")
    with pytest.raises(SpecError, match=r"pass max_norm=0\.5, the clipping norm, got None"):
        compressed(DifferentialPrivacyClientSideFixedClipping(FedAvg(), 1.0, 0.5, 4))
    compressed(DifferentialPrivacyClientSideFixedClipping(FedAvg(), 1.0, 0.5, 4), max_norm=0.5)
    with pytest.raises(SpecError, match="ServerSideAdaptiveClipping"):
        compressed(DifferentialPrivacyClientSideAdaptiveClipping(FedAvg(), 0.1, 40))
    inside = DifferentialPrivacyServerSideFixedClipping(compressed(FedAvg(**ALL)), 1.0, 0.5, 4)
    with pytest.raises(SpecError, match="reverse the order"):
        inside.start(MemoryGrid(nodes(tmp_path)), ArrayRecord(model()), num_rounds=1)
    with pytest.raises(StateError, match="start the strategy first"):
        _ = compressed(FedAvg()).traffic
    words = ArrayRecord({"w": Array(np.array(["a", "b"]))})
    with pytest.raises(SpecError, match=r"array 'w' .* is not a tensor"):
        compressed(FedAvg(**ALL)).start(MemoryGrid(nodes(tmp_path)), words, num_rounds=1)


def test_privacy_wrappers_see_plain_arrays(tmp_path: Path) -> None:
    private = DifferentialPrivacyServerSideFixedClipping(FedAvg(**ALL), 0.0, 0.1, 4)
    strategy = laconic.federated.compressed(private, up=STC, down=STC)
    result, _ = run(strategy, tmp_path, rounds=1)
    first = model()
    moved = [(tensors_of(result.arrays)[name] - first[name]).norm() for name in first if "weight" in name]
    assert 0 < float(torch.stack(moved).norm()) < 0.1 + 1e-5, "the mean of updates of norm 0.1"
    assert strategy.clipping_norm == 0.1, "other attributes are the wrapped strategy's"


def test_a_strategy_serves_one_model(tmp_path: Path) -> None:
    class Different(FedAvg):
        def configure_train(self, *args: Any) -> Any:
            messages = list(super().configure_train(*args))
            messages[1].content = RecordDict({"arrays": ArrayRecord(model(1))})
            return messages

    class Several(FedAvg):
        def configure_train(self, *args: Any) -> Any:
            messages = list(super().configure_train(*args))
            messages[0].content["controls"] = ArrayRecord(model(1))
            return messages

    with pytest.raises(SpecError, match="the same model"):
        run(laconic.federated.compressed(Different(**ALL)), tmp_path)
    with pytest.raises(SpecError, match="send one model: malformed: one ArrayRecord is expected, got 2"):
        run(laconic.federated.compressed(Several(**ALL)), tmp_path)


def test_a_model_that_diverged_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    class Diverges(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            bad = {**tensors_of(arrays), "first.bias": torch.full((40,), float("nan"))}
            return ArrayRecord(bad), metrics

    with pytest.raises(WireError, match=r"NaN or Inf in 'first\.bias'"):
        run(laconic.federated.compressed(Diverges(**ALL)), tmp_path)
