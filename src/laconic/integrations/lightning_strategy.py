"""Lightning's Trainer without a barrier: ranks periodically exchange parameters instead of gradients.

`distribute` replaces DDP when the Trainer sets up. A checkpoint has every rank's replica, optimiser
and memory, gathered by rank 0. At the end of training every rank loads the average.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.optim import Optimizer

from laconic.core.errors import AttachError
from laconic.optim.unwrapping import unwrap
from laconic.strategies.distribute import distribute, strategy_or_method
from laconic.strategies.distributed_optimizer import DistributedOptimizer
from laconic.strategies.parameter_controller import Statistics
from laconic.strategies.strategy import Strategy

_tied: WeakKeyDictionary[LightningModule, DistributedOptimizer] = WeakKeyDictionary()


class LightningStrategy(DDPStrategy):
    """Strategy for `laconic.distribute`, as `Trainer(strategy=LightningStrategy("diloco(every=100)"))`.

    The LightningModule must have one optimiser, which steps with this rank's gradients. Accumulation,
    precision plugins, schedules and clipping work unchanged. Validation and the model in a checkpoint use
    the group's average, and `fit(ckpt_path=...)` restores every rank's replica, on as many ranks.

    Args:
        spec: A strategy whose ranks exchange parameters, such as "local_sgd(every=8)".
        seed: Seed of sampling and rounding; a random topology has its own.
        statistics: BatchNorm's statistics: "average" or "keep", as for `laconic.distribute`.
        options: Options of Lightning's DDPStrategy that are not DDP's, such as `timeout`.

    Attributes:
        optimizer: The result of `laconic.distribute`, after set-up.

    Raises:
        AttachError: The spec is a method that exchanges gradients, or an option is not supported.
    """

    def __init__(
        self, spec: Any, *, seed: int = 0, statistics: Statistics = "average", **options: Any
    ) -> None:
        found = strategy_or_method(spec)
        if not isinstance(found, Strategy):
            raise AttachError(
                f'{found!r} exchanges gradients: Trainer(strategy="ddp",'
                " callbacks=[LightningCompression(...)])"
            )
        if options.get("start_method", "popen") != "popen":
            raise AttachError(
                f"start_method={options['start_method']!r} would start ranks that end with fit, and {found!r}"
                " would end with them: run a script, and omit start_method="
            )
        super().__init__(**options)
        if self._ddp_kwargs:
            raise AttachError(
                f"{found!r} uses no DistributedDataParallel: omit {next(iter(self._ddp_kwargs))}="
            )
        self.spec, self.seed, self.statistics = found, seed, statistics
        self.optimizer: DistributedOptimizer | None = None
        self._averaged = ExitStack()
        self._finished = False

    def configure_ddp(self) -> None:
        """Leave the model unwrapped."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        optimizers: list[Optimizer] = super().optimizers
        if len(optimizers) != 1:
            raise AttachError(
                f"{self.spec!r} supports one optimiser, and configure_optimizers returned"
                f" {len(optimizers)}: use its parameter groups, or laconic.distribute in your"
                " own script"
            )
        module = self.lightning_module
        assert module is not None
        if (earlier := _tied.pop(module, None)) is not None:
            earlier.remove()
        scaler = getattr(self.precision_plugin, "scaler", None)
        _, self.optimizer = distribute(
            self.model,
            optimizers[0],
            self.spec,
            seed=self.seed,
            statistics=self.statistics,
            scaler=scaler,
        )
        self._finished = False
        self.optimizers, _tied[module] = [self.optimizer], self.optimizer
        # at every batch the Trainer waits for rank 0 to report a SIGTERM
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing

    def on_validation_start(self) -> None:
        if self.optimizer is not None and self._fitting:
            self._averaged.enter_context(self.optimizer.averaged())

    def on_validation_end(self) -> None:
        self._averaged.close()

    def on_train_end(self) -> None:
        assert self.optimizer is not None
        self.optimizer.finish()
        self._finished = True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the group's average. The Trainer calls it on all ranks, before their optimisers' states."""
        self._averaged.close()  # if a checkpoint is saved when validation ends
        if self.optimizer is None or not self._fitting:
            return super().lightning_module_state_dict()
        with self.optimizer.averaged():
            own = super().lightning_module_state_dict()
            return {
                key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in own.items()
            }

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        inner = unwrap(optimizer)
        assert isinstance(inner, DistributedOptimizer)
        return inner.state_dict(gather=True)

    def teardown(self) -> None:
        """Load the average if no epoch was left to train, or this rank's replica if validation failed."""
        self._averaged.close()
        if self.optimizer is not None and self._fitting and not self._finished and self._running:
            self.on_train_end()  # the Trainer does not call it for a completed checkpoint
        super().teardown()

    @property
    def _fitting(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.state.fn == TrainerFn.FITTING

    @property
    def _running(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.state.status == TrainerStatus.RUNNING


def _nothing() -> None:
    """Replace the Trainer's wait at each batch."""
