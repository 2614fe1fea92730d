"""Where torch.compile is at work: its graphs save what they fuse, and no layer's input is there to code."""

from __future__ import annotations

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from laconic.core.errors import AttachError


def inside() -> bool:
    """Whether this runs in a compiled function: as it is traced, or in a part that runs as it is."""
    return torch.compiler.is_compiling() or callable(get_eval_frame_callback())


def refuse(what: str) -> AttachError:
    """The error for what is compiled."""
    return AttachError(
        f"{what} compiled, and a compiled graph saves what it fuses: compress the activations of the model"
        " as it is, or train the compiled one without"
    )


def check(model: nn.Module) -> None:
    """Raise `AttachError` if the model or a part of it is compiled."""
    for name, module in model.named_modules():
        compiled = getattr(module, "_compiled_call_impl", None) is not None
        if compiled or isinstance(module, torch._dynamo.OptimizedModule):
            raise refuse(f"{name or 'the model'} is")
