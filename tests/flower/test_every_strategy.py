"""The law of the two lines: they go with every strategy of Flower's, or refuse it and say why.

The table is Flower's own list, so that a strategy of a later version is tried too.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import flwr.serverapp.strategy as flower
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import FedAvg, Strategy

import laconic
from laconic.core.errors import SpecError
from laconic.federated.flower.strategy import Compressed
from tests.cases import over
from tests.flower.flower_world import MemoryGrid, app, tensors_of
from tests.unit.federated_world import model

NODES, ROUNDS = 5, 3
ALL: dict[str, Any] = {"fraction_train": 1.0, "min_train_nodes": NODES, "min_available_nodes": NODES}
NORM = 100.0  # above that of every update here: what clipping does to our updates is tested elsewhere
KNOWN = ALL | {
    "client_learning_rate": 0.1,
    "train_loss_key": "loss",
    "noise_multiplier": 0.01,
    "clipping_norm": NORM,
    "initial_clipping_norm": NORM,
    "num_sampled_clients": NODES,
}
EVERY = sorted(
    name
    for name in flower.__all__
    if isinstance(each := getattr(flower, name), type) and issubclass(each, Strategy) and each is not Strategy
)
REFUSED = {
    "DifferentialPrivacyClientSideAdaptiveClipping": "ServerSideAdaptiveClipping",
    "FedXgbBagging": "trees",
    "FedXgbCyclic": "trees",
}
SPARSE = "stc(density=0.05)"
BY_ENTRY = ("FedMedian", "FedTrimmedAvg")  # which take the entries of a model one by one


def made(name: str, inner: type[Strategy] = FedAvg) -> Any:
    """A strategy by its name, a wrapper around another one. Its further arguments are in `KNOWN`."""
    strategy = getattr(flower, name)
    wanted = inspect.signature(strategy).parameters
    given = {key: value for key, value in KNOWN.items() if key in wanted}
    return strategy(made(inner.__name__), **given) if "strategy" in wanted else strategy(**given)


def compressed(strategy: Any, up: str, down: str | None = None) -> Any:
    norm = NORM if "ClientSide" in type(strategy).__name__ else None
    return laconic.federated.compressed(strategy, up, down, max_norm=norm)


def settle(message: Message, context: Context, call_next: Any) -> Message:
    """A client mod: the nearest model T to the app's for which float32 has W + (T - W) = T.

    So no rounding is left between a run that sends T and one that sends T - W.
    """
    before = {name: value.float() for name, value in tensors_of(message.content["arrays"]).items()}
    message.content["arrays"] = ArrayRecord(before)  # as load_state_dict() does: FedAdam sends float64
    reply = call_next(message, context)
    if "arrays" in reply.content:
        wanted = {name: value.float() for name, value in tensors_of(reply.content["arrays"]).items()}
        for _ in range(20):
            again = {name: before[name] + (value - before[name]) for name, value in wanted.items()}
            done = all(torch.equal(again[name], value) for name, value in wanted.items())
            wanted = again
        assert done
        reply.content["arrays"] = ArrayRecord(wanted)
    return reply


class Ordered(MemoryGrid):
    """Replies come in the order of their nodes, so that sums have the same bits."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return sorted(
            super().send_and_receive(messages, timeout=timeout), key=lambda reply: reply.metadata.src_node_id
        )


def run(strategy: Any, mods: list[Any]) -> dict[str, torch.Tensor]:
    """The last model. Counters stay out: FedAvg makes fractions of them, and QFedAvg cannot take integers."""
    random.seed(0)
    np.random.seed(0)  # of the noise of the privacy wrappers
    first = {name: value for name, value in model().items() if value.is_floating_point()}
    outer = strategy.strategy if isinstance(strategy, Compressed) else strategy
    clips = [fixedclipping_mod] if "ClientSide" in type(outer).__name__ else []
    grid = Ordered({node: app(node, [*mods, settle, *clips]) for node in range(NODES)})
    return tensors_of(strategy.start(grid, ArrayRecord(first), num_rounds=ROUNDS).arrays)


WORKING = [name for name in EVERY if name not in REFUSED]
WRAPPERS = [name for name in WORKING if "strategy" in inspect.signature(getattr(flower, name)).parameters]


LOSSLESS = [(name, "FedAvg") for name in WORKING]
LOSSLESS += [(name, inner) for name in WRAPPERS for inner in ("FedAdam", "FedMedian", "Krum")]


@over(case=LOSSLESS)
def test_a_lossless_codec_changes_no_bit_of_any_strategy(case: tuple[str, str], tmp_path: Path) -> None:
    name, inner = case[0], getattr(flower, case[1])  # which is used by wrappers alone
    plain = run(made(name, inner), [])
    ours = run(compressed(made(name, inner), "dense()"), [laconic.federated.mod(tmp_path / str(case))])
    assert list(ours) == list(plain)
    assert all(torch.equal(ours[each], plain[each]) for each in plain)


LOSSY = [(name, "qsgd(levels=7)") for name in WORKING]
LOSSY += [(name, SPARSE) for name in WORKING if name not in BY_ENTRY]


@over(case=LOSSY)
def test_lossy_codecs_train_under_any_strategy(case: tuple[str, str], tmp_path: Path) -> None:
    name, spec = case
    strategy = compressed(made(name), spec, spec)
    last, first = run(strategy, [laconic.federated.mod(tmp_path / str(case))]), model()
    assert all(bool(value.isfinite().all()) for value in last.values())
    moved = (last["first.weight"].float() != first["first.weight"]).float().mean()
    assert moved > 0.04, "a client sends 5 % of its entries in one round"
    assert not strategy.traffic.refusals


@over(name=BY_ENTRY, up=[SPARSE, "topk(density=0.1)", "dgc(density=0.1)", "randomk(density=0.1)"])
def test_no_median_of_sparse_updates(name: str, up: str) -> None:
    """Fewer than half of the clients send an entry, so that its median never moves: 0 of 1,200 did."""
    with pytest.raises(SpecError, match="hardly any would ever change"):
        compressed(made(name), up)


def test_one_that_trims_nothing_takes_sparse_updates() -> None:
    compressed(flower.FedTrimmedAvg(beta=0.0), SPARSE)
    compressed(flower.Bulyan(), SPARSE)
    with pytest.raises(SpecError, match="hardly any would ever change"):
        compressed(flower.Bulyan(num_malicious_nodes=1), SPARSE)


@over(name=sorted(REFUSED))
def test_a_strategy_that_cannot_go_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(SpecError, match=REFUSED[name]):
        compressed(made(name), "dense()")


def test_so_are_trees_in_a_wrapper() -> None:
    with pytest.raises(SpecError, match="trees"):
        compressed(made("DifferentialPrivacyServerSideFixedClipping", flower.FedXgbBagging), "dense()")
