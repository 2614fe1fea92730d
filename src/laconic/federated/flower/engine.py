"""Schemes in Flower's simulation engine: each client runs in a Ray process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy

from laconic.core.errors import LaconicError
from laconic.federated.flower.mod import Mod
from laconic.federated.flower.records import record_of, rounded, tensors_of
from laconic.federated.flower.strategy import Compressed
from laconic.federated.form import Form, Tensors
from laconic.federated.rounds import Aggregate, Outcome, Train
from laconic.federated.samplings import Sampling
from laconic.federated.schemes import Scheme

ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
CLIENT, ROUND, EXAMPLES = "client", "server-round", "num-examples"
START_S, POLL_S = 120.0, 0.1
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}


class EngineError(LaconicError):
    """Flower's engine ended before the last round."""


class Numbered(Strategy):
    """Strategy that selects clients by number: the position of a node's id."""

    def __init__(
        self, model: Tensors, sampling: Sampling, aggregate: Aggregate, clients: int, seed: int
    ) -> None:
        self._form = Form.of(model)
        self._sampling, self._aggregate, self._clients, self._seed = sampling, aggregate, clients, seed
        self._model = model
        self._numbers: dict[int, int] = {}
        self.chosen: list[int] = []
        self.failed: dict[int, str] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        nodes = self._nodes(grid)
        self._numbers = {node: number for number, node in enumerate(nodes)}
        self._model = tensors_of(arrays)
        self.chosen = self._sampling.chosen(server_round, self._clients, self._seed)
        for number in self.chosen:
            asked = ConfigRecord({CLIENT: number, ROUND: server_round})
            content = RecordDict({ARRAYS: arrays, CONFIG: asked})
            yield Message(content, message_type="train", dst_node_id=nodes[number])

    def _nodes(self, grid: Grid) -> list[int]:
        until = time.monotonic() + START_S
        while len(nodes := sorted(grid.get_node_ids())) < self._clients:
            if time.monotonic() > until:
                raise EngineError(f"{len(nodes)} of {self._clients} nodes were connected after {START_S:g} s")
            time.sleep(POLL_S)
        return nodes

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate by the scheme's mean, in the order of clients' numbers."""
        came, self.failed = {}, {}
        for reply in replies:
            number = self._numbers[reply.metadata.src_node_id]
            if reply.has_error():
                self.failed[number] = reply.error.reason
            else:
                proposal = rounded(tensors_of(reply.content[ARRAYS]), self._form)
                came[number] = (proposal, int(reply.content[METRICS][EXAMPLES]))
        proposals = [came[number] for number in self.chosen if number in came]
        if not proposals:
            return None, None
        return record_of(self._aggregate(self._model, proposals)), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return ()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None

    def summary(self) -> None:
        """Do nothing at the start of a run."""


def app_of(train: Train, folder: Path) -> ClientApp:
    def answer(message: Message, context: Context) -> Message:
        asked = message.content[CONFIG]
        model = tensors_of(message.content[ARRAYS])
        trained, examples = train(int(asked[CLIENT]), model, int(asked[ROUND]))
        if not examples:
            none = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"client {asked[CLIENT]} has no examples")
            return Message(none, reply_to=message)
        counted = MetricRecord({EXAMPLES: examples})
        return Message(RecordDict({ARRAYS: record_of(trained), METRICS: counted}), reply_to=message)

    app = ClientApp(mods=[Mod(folder)])
    app.train()(answer)
    return app


def simulate(
    model: Tensors,
    train: Train,
    scheme: Scheme,
    tell: Callable[[Outcome], None],
    folder: Path,
    *,
    clients: int,
    sampling: Sampling,
    rounds: int,
    seed: int = 0,
    cores: Mapping[str, float] | None = None,
) -> None:
    """Train for `rounds` rounds in Flower's engine, like `federated.rounds.simulate`.

    Clients get the first model by message. `train` must be picklable; the engine's thread calls `tell` after
    each round; `folder` stores residuals; `cores`: Ray's resources per client, as {"num_cpus": 1}. Raises
    `EngineError`.
    """
    os.environ.update(QUIET)
    from flwr.simulation import run_simulation  # a slow import (Ray)

    numbered = Numbered(model, sampling, scheme.aggregate, clients, seed)
    strategy = Compressed(
        numbered,
        scheme.up,
        scheme.down,
        buffers="send",
        max_norm=scheme.max_norm,
        sampling=None,
        seed=seed,
        cache_nbytes=None,
    )
    logged = {"down": 0, "up": 0, "rounds": 0}

    def after(number: int, arrays: ArrayRecord) -> None:
        if not number:
            return
        down, up = strategy.traffic.down_nbytes, strategy.traffic.up_nbytes
        failed = dict(numbered.failed)
        sent, came = down - logged["down"], up - logged["up"]
        tell(Outcome(number, tuple(numbered.chosen), sent, came, tensors_of(arrays), failed))
        logged.update(down=down, up=up, rounds=number)

    def main(grid: Grid, context: Context) -> None:
        strategy.start(grid, record_of(model), num_rounds=rounds, evaluate_fn=after)

    server = ServerApp()
    server.main()(main)
    resources: dict[str, Any] = dict(cores or {"num_cpus": 1, "num_gpus": 0.0})
    run_simulation(server, app_of(train, folder), clients, backend_config={"client_resources": resources})
    if logged["rounds"] < rounds:
        raise EngineError(f"Flower's engine ended after {logged['rounds']} of {rounds} rounds")
