"""Callback for transformers' Trainer, which passes the bare model: it uses the Trainer's `model_wrapped`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from laconic.core.errors import AttachError
from laconic.core.warning import warn
from laconic.ddp.compress import compress, inside, is_sharded
from laconic.ddp.handle import Handle
from laconic.integrations import folder

if TYPE_CHECKING:
    from laconic.fsdp.handle import ShardedHandle


class TrainerCompression(TrainerCallback):
    """Callback that compresses gradients, `trainer.add_callback(TrainerCompression(trainer, "auto()"))`.

    Accumulation and mixed precision work unchanged. Clipping ends local momentum: with `dgc` set
    `max_grad_norm=0` and use `clip=`. Each checkpoint gets a file laconic.pt with the state of all ranks, and
    `train(resume_from_checkpoint=...)` resumes with the same bits, on as many ranks. Trials of a
    hyperparameter search, and checkpoints with `save_only_model`, get none.

    Args:
        trainer: The Trainer that gets the callback.
        spec: Spec, as for `laconic.compress`.
        seed: Seed of sampling and stochastic rounding; equal on all ranks.

    Attributes:
        handle: The result of `laconic.compress`, once training has started; statistics remain.
    """

    def __init__(self, trainer: Trainer, spec: Any, *, seed: int = 0) -> None:
        self.trainer, self.spec, self.seed = trainer, spec, seed
        self.handle: Handle | ShardedHandle | None = None
        self._resumed: Path | None = None
        self._attached = False
        trainer.train = self._noting(trainer.train)

    def _noting(self, train: Any) -> Any:

        @functools.wraps(train)
        def noted(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            given = resume_from_checkpoint
            if given is True:
                given = get_last_checkpoint(self.trainer.args.output_dir)
            self._resumed = Path(given) if given else None
            found = train(resume_from_checkpoint, *args, **kwargs)
            self._detach()
            return found

        return noted

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach to the wrapped model, and restore the state from the Trainer's checkpoint.

        Raises:
            AttachError: evaluate() ran before train(), the model uses FSDP1 or DeepSpeed, or it does not
                support the method.
            StateError: The state belongs to another run.
        """
        self._detach()  # from an attempt under auto_find_batch_size
        model, resumed = self.trainer.model_wrapped, self._resumed
        if args.world_size == 1 and inside(model) is None:
            warn(
                "there is only one process, so nothing is exchanged or compressed: torchrun"
                " --nproc-per-node 2 starts two",
            )
            return
        if inside(model) is None and not is_sharded(model) and not parallel_otherwise(self.trainer):
            raise AttachError(
                f"the Trainer trains {type(model).__name__} on {args.world_size} ranks without"
                " DistributedDataParallel, so that each rank trains a separate model, because evaluate() or"
                " predict() ran before train(). Call train() first, or create a new Trainer for it"
            )
        self.handle = compress(model, self.trainer.optimizer, self.spec, seed=self.seed)
        self._attached = True
        if resumed is not None and not folder.load(self.handle, resumed):
            warn(
                f"{resumed} was saved without {folder.NAME}*.pt: {self.handle.method} starts with an empty"
                " memory",
            )

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.handle is None or args.save_only_model or state.is_hyper_param_search:
            return
        folder.save(self.handle, Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")

    def _detach(self) -> None:
        if self._attached and self.handle is not None:
            self._attached = False
            self.handle.remove()


def parallel_otherwise(trainer: Trainer) -> bool:
    return bool(trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled)
