"""Residuals of a compressed model in checkpoints of Accelerate (huggingface.co/docs/accelerate)."""

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
    """Save and load this handle's state with `accelerator.save_state` and `load_state`.

    Call it on all ranks, once after each `compress` of the result of `accelerator.prepare`; a removed handle
    is no longer saved. A resumed run has the same bits. All ranks call `save_state`, which gathers all states
    on rank 0; with error feedback on a sharded model each rank writes its own.

    Args:
        accelerator: The Accelerator that prepared the model.
        handle: The result of `laconic.compress`.
        name: Unique name of the handle's file, without suffix, or prefix if each rank writes one.

    Raises:
        AttachError: This Accelerator saves another handle with that name.
    """
    names, kept = _names.setdefault(accelerator, {}), weakref.ref(handle)
    if (other := names[name]() if name in names else None) is handle:
        return
    if other is not None:
        raise AttachError(
            f"this Accelerator saves another handle as {name!r} already: give each a unique name, such as"
            f" keep_with(accelerator, handle, name={name + '2'!r})"
        )
    names[name] = kept

    def saving(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if (living := kept()) is not None:
            folder.save(living, output_dir, name)

    def loading(models: list[Any], input_dir: str) -> None:
        if (living := kept()) is not None and not folder.load(living, input_dir, name):
            warn(
                f"{input_dir} was saved without {name}*.pt: {living.method} starts with an empty memory",
            )

    saves = accelerator.register_save_state_pre_hook(saving)
    loads = accelerator.register_load_state_pre_hook(loading)

    def freed() -> None:
        names.pop(name, None)

    handle.when_removed(saves.remove, loads.remove, freed)
