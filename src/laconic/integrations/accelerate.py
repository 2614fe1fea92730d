"""Accelerate (huggingface.co/docs/accelerate): its checkpoints hold what a compressed model has not sent yet.

`laconic.compress` takes what `accelerator.prepare` returned as it is; only checkpoints need a word more.
"""

from __future__ import annotations

import weakref
from typing import Any

from accelerate import Accelerator

from laconic.core.errors import AttachError
from laconic.core.warning import warn
from laconic.ddp.handle import Handle
from laconic.fsdp.handle import ShardedHandle
from laconic.integrations import folder

Names = dict[str, weakref.ref[Handle | ShardedHandle]]
_names: weakref.WeakKeyDictionary[Accelerator, Names] = weakref.WeakKeyDictionary()


def keep_with(accelerator: Accelerator, handle: Handle | ShardedHandle, *, name: str = folder.NAME) -> None:
    """Let `accelerator.save_state` and `load_state` save and load this handle's memory too.

    Call it on all ranks, once after each `compress`; a handle that is removed is saved no more. A run that is
    resumed has the same bits as one that was not stopped. `save_state`, which all ranks call anyway, then
    gathers the memory of all on rank 0; of a sharded model with error feedback each rank writes its own.

    Args:
        accelerator: The Accelerator that prepared the model.
        handle: What `laconic.compress` returned.
        name: Of the file in the checkpoint's folder, or of its beginning where each rank writes one; without
            its ending. One for each handle. Default: "laconic".

    Raises:
        AttachError: This Accelerator saves another handle by that name.
    """
    names, kept = _names.setdefault(accelerator, {}), weakref.ref(handle)
    if (other := names[name]() if name in names else None) is handle:
        return
    if other is not None:
        raise AttachError(
            f"this Accelerator saves another handle as {name!r} already: give each a name of its own, such as"
            f" keep_with(accelerator, handle, name={name + '2'!r})"
        )
    names[name] = kept

    def saving(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if (living := kept()) is not None:
            folder.save(living, output_dir, name)

    def loading(models: list[Any], input_dir: str) -> None:
        if (living := kept()) is not None and not folder.load(living, input_dir, name):
            warn(
                f"{input_dir} was saved without {name}*.pt: {living.method} begins with an empty memory",
            )

    saves = accelerator.register_save_state_pre_hook(saving)
    loads = accelerator.register_load_state_pre_hook(loading)

    def freed() -> None:
        names.pop(name, None)

    handle.when_removed(saves.remove, loads.remove, freed)
