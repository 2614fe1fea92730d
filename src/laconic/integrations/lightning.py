"""Callback for Lightning's Trainer that attaches to the wrapped model.

Lightning itself registers communication hooks only on CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities import rank_zero_info

from laconic.comm.torch_comm import TorchComm
from laconic.core.errors import AttachError
from laconic.core.warning import warn
from laconic.ddp.compress import FOREIGN, compress, inside
from laconic.ddp.handle import Handle
from laconic.exchange.gathered import gather_states
from laconic.exchange.state import RankState

if TYPE_CHECKING:
    from laconic.fsdp.handle import ShardedHandle

STRATEGIES = {"FSDPStrategy": "FullyShardedDataParallel", "DeepSpeedStrategy": "DeepSpeedEngine"}


class LightningCompression(Callback):
    """Callback that compresses a model's gradients, `Trainer(callbacks=[LightningCompression("auto()")])`.

    Supports `strategy="ddp"`, whose ranks each run the whole script, and ModelParallelStrategy with methods
    that can be sharded. Accumulation, precision plugins and manual optimisation work unchanged. Clipping ends
    local momentum; `dgc` has `clip=`. Checkpoints hold the state of all ranks; `fit(ckpt_path=...)` resumes
    with the same bits, on as many ranks.

    Args:
        spec: Spec, as for `laconic.compress`.
        seed: Seed of sampling and stochastic rounding; equal on all ranks.

    Attributes:
        handle: The result of `laconic.compress`, once training has started; statistics remain after `fit`.
    """

    def __init__(self, spec: Any, *, seed: int = 0) -> None:
        self.spec, self.seed = spec, seed
        self.handle: Handle | ShardedHandle | None = None
        self._saved: dict[str, Any] | None = None
        self._left: RankState | None = None  # after `fit`

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise before anything is wrapped.

        Raises:
            AttachError: The strategy is FSDP1's or DeepSpeed's, already has a communication hook, or starts
                ranks that end with `fit`.
        """
        self._saved = None  # from a checkpoint used only for testing
        strategy = trainer.strategy
        for kind in type(strategy).__mro__:
            if kind.__name__ in STRATEGIES:
                raise AttachError(f"{kind.__name__} supports no method: {FOREIGN[STRATEGIES[kind.__name__]]}")
        if getattr(strategy, "_ddp_comm_hook", None) is not None:
            raise AttachError(
                "this DDPStrategy has a communication hook, and DDP allows only one: omit ddp_comm_hook="
            )
        if stage == "fit" and isinstance(strategy.launcher, _MultiProcessingLauncher):
            raise AttachError(
                f"this {type(strategy).__name__} starts ranks that end with fit, and the handle would end"
                " with them: run a script with strategy='ddp' instead of ddp_spawn, ddp_fork or ddp_notebook"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the wrapped model, and restore the state from the Trainer's checkpoint.

        Raises:
            AttachError: The model does not support the method, or the Trainer writes checkpoints and the
                method has residuals for shards, which rank 0 cannot gather.
        """
        saved, self._saved, self._left = self._saved, None, None
        model = trainer.strategy.model
        if trainer.world_size == 1 and inside(model) is None:
            warn(
                "there is only one process, so nothing is exchanged or compressed: Trainer(devices=2,"
                ' strategy="ddp") starts two',
            )
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.handle = compress(model, trainer.optimizers, self.spec, scaler=scaler, seed=self.seed)
        if trainer.checkpoint_callbacks and self.handle.saved_by_each:
            method = self.handle.method
            self.handle.remove()
            self.handle = None
            raise AttachError(
                f"{method} keeps a memory for the shards of the model, which a checkpoint of the Trainer"
                " cannot hold: use Trainer(enable_checkpointing=False), or a method without"
                ' memory, such as "cgx(bits=4)"'
            )
        if saved is not None:
            self.handle.load_state_dict(saved)
        elif trainer.ckpt_path is not None:
            warn(
                f"{trainer.ckpt_path} was saved without {type(self).__name__}, which starts with an empty"
                " memory",
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.handle is None:
            return
        stats = self.handle.stats()
        rank_zero_info(
            f"{self.handle.method}: each rank sent about {stats.network_sent / 1e6:.1f} MB, {stats.ratio:.0f}"
            " times less than dense"
        )
        if isinstance(self.handle, Handle):
            self._left = self.handle.state_dict()
        self.handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks, on rank 0. The Trainer calls it on all ranks, also after `fit`."""
        if self._left is not None:
            comm = TorchComm.own(dist.group.WORLD)  # the handle's is closed
            try:
                return dict(gather_states(self._left, comm))
            finally:
                comm.close()
        if self.handle is None or self.handle.saved_by_each:
            return {}
        return dict(self.handle.state_dict(gather=True))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict
