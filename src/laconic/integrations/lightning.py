"""Lightning's Trainer: a callback that compresses what its ranks exchange (lightning.ai).

Lightning registers communication hooks on CUDA only, and wraps the model when `fit` has begun: so the
callback attaches to what the Trainer has wrapped, as training starts.
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
    """Compresses the gradients of a Trainer's model, `Trainer(callbacks=[LightningCompression("auto()")])`.

    For `strategy="ddp"`, whose ranks each run the whole script, and for ModelParallelStrategy with methods
    that can be sharded. Accumulation, precision plugins and manual optimisation go on as they are, and so
    does clipping, but with momentum correction (`dgc`), whose `clip=` is to be used instead. Checkpoints of
    the Trainer hold the memory of all ranks, which rank 0 gathers; `fit(ckpt_path=...)` goes on with the same
    bits, on as many ranks.

    Args:
        spec: As `laconic.compress` takes it.
        seed: Of sampling and stochastic rounding; equal on all ranks. Default: 0.

    Attributes:
        handle: What `laconic.compress` returned, from the start of training on; its figures stay.
    """

    def __init__(self, spec: Any, *, seed: int = 0) -> None:
        self.spec, self.seed = spec, seed
        self.handle: Handle | ShardedHandle | None = None
        self._saved: dict[str, Any] | None = None
        self._left: RankState | None = None  # the memory of this rank when `fit` has ended

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a strategy that cannot take a method, before anything is wrapped.

        Raises:
            AttachError: The strategy is FSDP1's or DeepSpeed's, has a communication hook already, or starts
                its ranks from within the script, which `fit` ends.
        """
        self._saved = None  # of a checkpoint that was only tested
        strategy = trainer.strategy
        for kind in type(strategy).__mro__:
            if kind.__name__ in STRATEGIES:
                raise AttachError(f"{kind.__name__} takes no method: {FOREIGN[STRATEGIES[kind.__name__]]}")
        if getattr(strategy, "_ddp_comm_hook", None) is not None:
            raise AttachError(
                "this DDPStrategy has a communication hook, and DDP takes one for life: leave ddp_comm_hook="
                " out"
            )
        if stage == "fit" and isinstance(strategy.launcher, _MultiProcessingLauncher):
            raise AttachError(
                f"this {type(strategy).__name__} starts ranks that end with fit, and the handle would end"
                " with them: run a script with strategy='ddp' in place of ddp_spawn, ddp_fork or ddp_notebook"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the wrapped model, and go on from the checkpoint that the Trainer has loaded.

        Raises:
            AttachError: The model cannot take the method, or the method keeps a memory beside shards and the
                Trainer makes checkpoints: rank 0, which writes these, cannot gather it.
        """
        saved, self._saved, self._left = self._saved, None, None
        model = trainer.strategy.model
        if trainer.world_size == 1 and inside(model) is None:
            warn(
                "there is one process, so nothing is exchanged and nothing compressed: Trainer(devices=2,"
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
                f"{method} keeps a memory beside the shards of the model, which no checkpoint of the Trainer"
                " can hold: leave these out, Trainer(enable_checkpointing=False), or take a method without"
                ' memory, such as "cgx(bits=4)"'
            )
        if saved is not None:
            self.handle.load_state_dict(saved)
        elif trainer.ckpt_path is not None:
            warn(
                f"{trainer.ckpt_path} was saved without {type(self).__name__}, which begins with an empty"
                " memory",
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the optimisers plain again, after the last checkpoint."""
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
        """The memory of all ranks, on rank 0. The Trainer calls it on all of them, also after `fit`."""
        if self._left is not None:
            comm = TorchComm.own(dist.group.WORLD)  # the handle's own has ended with it
            try:
                return dict(gather_states(self._left, comm))
            finally:
                comm.close()
        if self.handle is None or self.handle.saved_by_each:
            return {}
        return dict(self.handle.state_dict(gather=True))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the saved memory until the model is wrapped."""
        self._saved = state_dict
