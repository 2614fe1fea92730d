"""How far one client's answer may move the model: what is finite can still ruin a mean."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.federated.form import Form
from laconic.federated.message import Refused

LARGEST = 1e3  # of an update's norm: so many norms of the model, or of 1
FARTHEST = 1e6  # that an entry of a buffer moves: so many times the buffer's largest entry, or 1


def not_finite(form: Form, model: Mapping[str, Tensor]) -> str | None:
    """The first tensor of a model that travels and holds NaN, Inf or, compressed, more than float32 can."""
    for member in form.members:
        if member.role != "local":
            value = model[member.name].detach()
            if not bool((value.to(torch.float32) if member.role == "coded" else value).isfinite().all()):
                return member.name
    return None


def check_update(update: Tensor, model: Tensor) -> float:
    """The norm of an update float32 (n,). Raises `Refused` where it is far larger than the model (n,)."""
    norm = float(update.double().norm())
    most = LARGEST * max(1.0, float(model.double().norm()))
    if not norm <= most:
        raise Refused("too large", f"the update's norm is {norm:.4g}, at most {most:.4g} is taken")
    return norm


def check_buffers(buffers: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    """Raise `Refused` for a buffer, of any shape and dtype, that is not finite or far from what it was."""
    for name, value in buffers.items():
        if not bool(value.isfinite().all()):
            raise Refused("not finite", "a buffer holds NaN or Inf")
        if value.numel():
            was = before[name].double()
            moved, most = (value.double() - was).abs().max(), FARTHEST * was.abs().max().clamp(min=1)
            if not moved <= most:
                raise Refused(
                    "too large", f"buffer {name!r} moves by {moved:.4g}, at most {most:.4g} is taken"
                )


def check_fits(proposed: Mapping[str, Tensor]) -> None:
    """Raise `Refused` where a model with its update has become Inf, as in half precision it does early."""
    for name, value in proposed.items():
        if not bool(value.isfinite().all()):
            raise Refused("too large", f"{name!r} and its update do not fit in {value.dtype}")
