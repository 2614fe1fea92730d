"""Checks for torch.compile: a compiled graph saves fused tensors, so no layer input can be encoded."""

from __future__ import annotations

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from laconic.core.errors import AttachError


def is_compiling() -> bool:
    """Return whether this runs in a compiled function: while tracing, or after a graph break."""
    return torch.compiler.is_compiling() or callable(get_eval_frame_callback())


def compiled_error(what: str) -> AttachError:
    return AttachError(
        f"{what} compiled, and a compiled graph saves fused tensors: compress the activations of the model"
        " that is not compiled, or train the compiled model without"
    )


def check(model: nn.Module) -> None:
    for name, module in model.named_modules():
        compiled = getattr(module, "_compiled_call_impl", None) is not None
        if compiled or isinstance(module, torch._dynamo.OptimizedModule):
            raise compiled_error(f"{name or 'the model'} is")
