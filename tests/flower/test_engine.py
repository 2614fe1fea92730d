"""Our schemes in Flower's simulation engine: the models of `federated.rounds.simulate`, bit for bit.

Codecs that draw are not among them: what a client draws depends on its name, which here is its node's id.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from laconic.federated import rounds
from laconic.federated.flower import engine
from laconic.federated.rounds import Aggregate, Outcome, Proposals
from laconic.federated.samplings.constant import Constant
from laconic.federated.schemes import Scheme, scheme_of
from laconic.tools.tasks import find
from laconic.tools.tasks.federation import Federation, federate
from laconic.tools.tasks.on_flower import EngineFailed, federate_on_flower
from tests.flower.flower_world import MemoryGrid
from tests.unit.federated_world import model, train

CLIENTS, ROUNDS, HALF = 4, 5, Constant(0.5)


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's engine without Ray: nodes are there late, and one after the other."""

    def run(server: ServerApp, client: ClientApp, nodes: int, backend_config: dict[str, Any]) -> None:
        class Late(MemoryGrid):
            there = 0

            def get_node_ids(self) -> list[int]:
                self.there = min(nodes, self.there + 1)
                return [100 - node for node in range(self.there)]

        grid = Late({100 - node: client for node in range(nodes)})
        server(grid=grid, context=Context(7, 0, {}, RecordDict(), {}))

    monkeypatch.setattr("flwr.simulation.run_simulation", run)


def _in_engine(spec: str, folder: Path, training: Any = train) -> list[Outcome]:
    told: list[Outcome] = []
    settings = {"clients": CLIENTS, "sampling": HALF, "rounds": ROUNDS, "seed": 3}
    engine.simulate(model(), training, scheme_of(spec), told.append, folder, **settings)
    return told


@pytest.mark.parametrize(
    "spec", ["fedavg()", "stc(density=0.1, down=0.1)", "signsgd()", "updates(sign(), max_norm=0.5)"]
)
def test_models_are_those_of_one_process(spec: str, in_memory: None, tmp_path: Path) -> None:
    told = _in_engine(spec, tmp_path)
    scheme = scheme_of(spec)
    here = rounds.simulate(
        model(),
        train,
        scheme.server(model(), seed=3),
        clients=CLIENTS,
        sampling=HALF,
        rounds=ROUNDS,
        aggregate=scheme.aggregate,
        seed=3,
    )
    for ours, theirs in zip(here, told, strict=True):
        assert (ours.number, ours.chosen, dict(ours.failed)) == (theirs.number, theirs.chosen, {})
        assert all(torch.equal(value, theirs.model[name]) for name, value in ours.model.items())
        assert ours.up == theirs.up > 0


def test_a_client_without_examples_counts_in_no_mean(in_memory: None, tmp_path: Path) -> None:
    def training(who: int, given: Any, number: int) -> tuple[Any, int]:
        trained, examples = train(who, given, number)
        return trained, 0 if who == 1 else examples

    told = _in_engine("fedavg()", tmp_path, training)
    assert {who for each in told for who in each.failed} == {1}
    assert "no examples" in next(each.failed[1] for each in told if 1 in each.failed)
    both = [each for each in told if each.failed and len(each.chosen) == 2]
    assert both, "client 1 never took part"


def test_a_mean_of_nobody_keeps_the_model(in_memory: None, tmp_path: Path) -> None:
    told = _in_engine("fedavg()", tmp_path, lambda who, given, number: (given, 0))
    assert len(told) == ROUNDS
    assert all(torch.equal(value, told[-1].model[name]) for name, value in model().items())


def test_an_error_of_the_server_is_the_run_s(in_memory: None, tmp_path: Path) -> None:
    class Fails(Scheme):
        @property
        def aggregate(self) -> Aggregate:
            def none(given: Any, proposals: Proposals) -> Any:
                raise ArithmeticError("no mean today")

            return none

    scheme = Fails()
    with pytest.raises(ArithmeticError, match="no mean today"):
        engine.simulate(
            model(), train, scheme, print, tmp_path, clients=CLIENTS, sampling=HALF, rounds=ROUNDS
        )


def _settings(**changes: Any) -> Federation:
    given = {"task": "mnist", "model": None, "spec": "stc(density=0.01, down=0.01)", "by": "iid()"}
    sizes = {"clients": 4, "per_round": 2, "rounds": 2, "local_steps": 3, "batch": 20, "eval_every": 1}
    return Federation(**{**given, **sizes, "lr": 0.05, "momentum": 0.0, "seed": 0, **changes})


def test_an_engine_that_ends_early_is_told_with_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "flower.log"
    with pytest.raises(
        EngineFailed,
        match=r"exit code 1 after 0 of 2 rounds; .*flower.log ends with:\n(.|\n)*mnist: no mnist.npz",
    ):
        list(federate_on_flower(_settings(), tmp_path, log))


@pytest.mark.soak  # Ray gives up where its processes take more than half a minute to start
@pytest.mark.timeout(580)
def test_ray_trains_the_model_of_one_process(tmp_path: Path) -> None:
    if "LACONIC_DATA" not in os.environ:
        pytest.skip("LACONIC_DATA, the folder of mnist.npz, is not set")
    torch.set_num_threads(1)  # the order of a sum depends on it
    told = list(federate_on_flower(_settings(), None, tmp_path / "flower.log"))
    here = list(federate(_settings(), find("mnist").load(None)))
    for ours, theirs in zip(here, told, strict=True):
        same = ("round", "chosen", "up", "accuracy", "test_loss", "failed")
        assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
