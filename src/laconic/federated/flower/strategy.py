"""Flower strategy with compressed messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from laconic.core.errors import SpecError, StateError
from laconic.core.spec import parse
from laconic.federated.flower.fitting import check_fits, innermost
from laconic.federated.flower.grid import CompressingGrid
from laconic.federated.form import Buffers, Tensors
from laconic.federated.samplings import LEAST, Sampling
from laconic.federated.server import Server
from laconic.federated.traffic import Traffic

TIMEOUT_S = 3600.0
CHOICE = ("fraction_train", "min_train_nodes")  # FedAvg's attributes
FURTHER = ("min_available_nodes", "weighted_by_key")


class Compressed(Strategy):
    """Wrapper of `laconic.federated.compressed`, with the wrapped strategy's attributes."""

    def __init__(
        self,
        strategy: Strategy,
        up: Any,
        down: Any,
        *,
        buffers: Buffers,
        max_norm: float | None,
        sampling: Sampling | str | None,
        seed: int,
        cache_nbytes: int | None,
    ) -> None:
        if not isinstance(strategy, Strategy):
            raise SpecError(
                f"a flwr.serverapp.strategy.Strategy is expected, got {type(strategy).__name__}: those of"
                " flwr.server.strategy, and secure aggregation with them, use other messages"
            )
        if isinstance(strategy, Compressed):
            raise SpecError("this strategy is compressed already")
        self.strategy = strategy
        self._sampling = _sampling(sampling)
        if self._sampling is not None and self._chooser() is None:
            raise SpecError(
                f"sampling sets fraction_train, which {type(strategy).__name__} does not have: omit sampling"
            )

        def serve(model: Tensors, buffers: Buffers = buffers) -> Server:
            return Server(
                model, up, down, buffers=buffers, max_norm=max_norm, seed=seed, cache_nbytes=cache_nbytes
            )

        # check arguments before nodes connect; `buffers` may name tensors of the model
        serve(
            {"w": torch.zeros(1, 1, dtype=torch.float32, device="cpu")},
            buffers if isinstance(buffers, str) else "send",
        )
        check_fits(strategy, up, max_norm)
        self._serve = serve
        self._grid: CompressingGrid | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "strategy":
            raise AttributeError(name)
        return getattr(self.strategy, name)

    @property
    def server(self) -> Server:
        """Server of the model. Raises `StateError` before a run."""
        if self._grid is None or self._grid.server is None:
            raise StateError("no message was sent yet: start the strategy first")
        return self._grid.server

    @property
    def traffic(self) -> Traffic:
        """Bytes by version and node, and refusals. Raises `StateError` before a run."""
        return self.server.traffic

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = TIMEOUT_S,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        chooser = self._chooser()
        before = {} if chooser is None else {name: getattr(chooser, name) for name in CHOICE}
        round_number = 1

        def set_fraction() -> None:
            if self._sampling is not None and chooser is not None:
                chooser.fraction_train = self._sampling.fraction(round_number)
                chooser.min_train_nodes = max(LEAST, before["min_train_nodes"])

        def trained() -> None:
            nonlocal round_number
            round_number += 1
            set_fraction()

        set_fraction()
        self._grid = CompressingGrid(
            grid,
            self._serve,
            weighted_by=None if chooser is None else chooser.weighted_by_key,
            loss=getattr(chooser, "train_loss_key", None),
            least_nodes=0 if chooser is None else chooser.min_available_nodes,
            trained=trained,
        )
        try:
            return self.strategy.start(
                self._grid,
                initial_arrays,
                num_rounds,
                timeout,
                train_config,
                evaluate_config,
                evaluate_fn,
            )
        finally:
            for name, value in before.items():
                setattr(chooser, name, value)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._check_grid(grid)
        return self.strategy.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._check_grid(grid)
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        self.strategy.summary()

    def _check_grid(self, grid: Grid) -> None:
        if not isinstance(grid, CompressingGrid):
            raise SpecError(
                "a wrapper around compressed(strategy) would send plain models: reverse the order,"
                " compressed(wrapper(strategy))"
            )

    def _chooser(self) -> Any:
        found = innermost(self.strategy)
        return found if all(hasattr(found, name) for name in (*CHOICE, *FURTHER)) else None


def _sampling(given: Sampling | str | None) -> Sampling | None:
    found = parse(given) if isinstance(given, str) else given
    if found is not None and not isinstance(found, Sampling):
        raise SpecError(f"sampling must be a sampling such as falling(0.2, rate=0.05), got {given!r}")
    return found
