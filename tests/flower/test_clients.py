"""What a client keeps between rounds, and what happens where it loses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

import laconic
from laconic.core.errors import SpecError
from laconic.federated.flower.mod import default_folder
from laconic.federated.memory import InFile
from tests.flower.flower_world import RUN, MemoryGrid, app, nodes, tensors_of
from tests.unit.federated_world import equal, model

STC = "stc(density=0.05)"


def start(world: dict[int, ClientApp], rounds: int = 4, **more: Any) -> tuple[Any, Any, MemoryGrid]:
    inner = FedAvg(min_train_nodes=len(world), min_available_nodes=len(world), fraction_evaluate=0.0, **more)
    strategy = laconic.federated.compressed(inner, up=STC, down=STC)
    grid = MemoryGrid(world)
    return strategy.start(grid, ArrayRecord(model()), num_rounds=rounds), strategy, grid


def memory(folder: Path, node: int) -> InFile:
    return InFile(folder, str(RUN), str(node))


def before_round(number: int, do: Any) -> Any:
    """A mod that does something when the message of this round has come."""

    def act(message: Message, context: Context, call_next: Any) -> Message:
        if int(message.content["config"]["server-round"]) == number:
            do()
        return call_next(message, context)

    return act


def test_what_a_client_holds_back_is_in_its_file(tmp_path: Path) -> None:
    start(nodes(tmp_path))
    state = memory(tmp_path, 2).load()
    assert state["rounds"] == 4 and float(state["residual"].norm()) > 0
    assert sorted(path.name for path in (tmp_path / str(RUN)).iterdir()) == [f"{n}.client" for n in range(4)]


def test_a_client_that_dies_while_it_trains_goes_on_where_it_stood(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    def die() -> None:
        kept.update(memory(tmp_path, 1).load())
        raise OSError("killed")

    mods = [laconic.federated.mod(tmp_path), before_round(3, die)]
    result, strategy, _ = start({**nodes(tmp_path), 1: app(1, mods)}, rounds=3)
    assert kept["rounds"] == 2
    after = memory(tmp_path, 1).load()
    assert torch.equal(after["residual"], kept["residual"]) and after["rounds"] == 2
    assert set(result.train_metrics_clientapp) == {1, 2, 3}
    assert strategy.server.holds("1") == 2 and strategy.server.holds("0") == 3


def test_a_client_that_has_lost_its_memory_gets_the_model_in_the_same_round(tmp_path: Path) -> None:
    seen: list[Any] = []

    def lose() -> None:
        memory(tmp_path, 1).path.unlink()

    world = nodes(tmp_path, seen=seen)
    world[1] = app(1, [_once(3, lose), laconic.federated.mod(tmp_path)], seen)
    _, strategy, grid = start(world)
    third = [tensors for _, number, _, tensors in seen if number == 3]
    assert len(third) == 4 and all(equal(each, third[0]) for each in third)
    kinds = strategy.traffic.rounds[2].kinds
    assert kinds["updates"] == 4 and kinds["whole"] == 1 and kinds["form"] == 1
    assert len(grid.sent) == 4 * 4 + 1
    assert not strategy.traffic.refusals


def _once(number: int, do: Any) -> Any:
    done: list[int] = []

    def first() -> None:
        if not done:
            done.append(number)
            do()

    return before_round(number, first)


@pytest.mark.parametrize("what", ["damaged", "no room"])
def test_a_memory_that_fails_is_named_and_the_others_go_on(what: str, tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    path = memory(own, 1).path

    def spoil() -> None:
        if what == "damaged":
            path.write_bytes(b"?")
        else:
            path.unlink(missing_ok=True)
            path.parent.rmdir()
            path.parent.write_text("a file, where a folder is needed")

    world = {**nodes(shared), 1: app(1, [_once(2, spoil), laconic.federated.mod(own)])}
    result, _, grid = start(world, rounds=2)
    reasons = [reply.error.reason for reply in grid.came if reply.has_error()]
    assert len(reasons) == (1 if what == "damaged" else 2), (
        "without its memory it needs the whole model first"
    )
    said = f"{path} is damaged" if what == "damaged" else f"cannot save {path}"
    assert reasons[-1].startswith(f"StateError: {said}")
    assert set(result.train_metrics_clientapp) == {1, 2}


def test_a_client_whose_training_diverged_says_so(tmp_path: Path) -> None:
    diverging = ClientApp(mods=[laconic.federated.mod(tmp_path)])

    @diverging.train()
    def train(message: Message, context: Context) -> Message:
        bad = {**message.content["arrays"].to_torch_state_dict(), "first.bias": torch.full((40,), torch.inf)}
        metrics = MetricRecord({"num-examples": 1, "loss": 0.0})
        return Message(RecordDict({"arrays": ArrayRecord(bad), "metrics": metrics}), reply_to=message)

    result, _, grid = start({**nodes(tmp_path), 1: diverging}, rounds=2)
    reasons = {reply.error.reason for reply in grid.came if reply.has_error()}
    assert len(reasons) == 1 and "diverged: 'first.bias', or its update" in reasons.pop()
    assert set(result.train_metrics_clientapp) == {1, 2}


def test_a_client_may_insist_on_its_specs(tmp_path: Path) -> None:
    insists = app(1, [laconic.federated.mod(tmp_path, up="topk(density=0.5)")])
    _, _, grid = start({**nodes(tmp_path), 1: insists}, rounds=1)
    reason = next(reply.error.reason for reply in grid.came if reply.has_error())
    assert "the server has up='stc(density=0.05)', this client 'topk(density=0.5)'" in reason


def test_messages_of_others_pass_through(tmp_path: Path) -> None:
    plain = FedAvg(min_train_nodes=4, min_available_nodes=4)
    ours = plain.start(MemoryGrid(nodes(tmp_path)), ArrayRecord(model()), num_rounds=2)
    theirs = plain.start(MemoryGrid({n: app(n, []) for n in range(4)}), ArrayRecord(model()), num_rounds=2)
    for name, value in tensors_of(ours.arrays).items():  # FedAvg adds replies in the order of its sample
        assert torch.allclose(value, tensors_of(theirs.arrays)[name], atol=1e-5), (
            "a server without compressed()"
        )
    assert not list(tmp_path.iterdir())


def test_the_default_folder_is_the_users_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "laconic" / "federated"
    start({node: app(node, [laconic.federated.mod()]) for node in range(2)}, rounds=1)
    assert (default_folder() / str(RUN) / "0.client").exists()
    monkeypatch.delenv("XDG_STATE_HOME")
    assert default_folder() == Path.home() / ".local" / "state" / "laconic" / "federated"


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ({"up": "stcc(density=0.1)"}, "unknown name 'stcc'"),
        ({"up": "powersgd(rank=2)"}, "needs all ranks at once"),
        ({"down": "stc(density=0)"}, "density must be a number"),
        ({"down": "dgc(density=0.1, clip=1.0)"}, "would limit the model update"),
        ({"up": 3}, "3"),
    ],
)
def test_a_bad_spec_shows_when_the_mod_is_made(specs: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Not at the first message, on the clients' machines."""
    with pytest.raises(SpecError, match=words):
        laconic.federated.mod(tmp_path, **specs)
    laconic.federated.mod(tmp_path, up="stc(density=0.1, down=0.1)", down="stc(density=0.1, down=0.1)")
