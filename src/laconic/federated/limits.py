"""Limits of a client's reply: finite values can ruin a mean."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.federated.form import Form
from laconic.federated.message import Refused

LARGEST = 1e3  # norm of an update, relative to max(1, norm of the model)
FARTHEST = 1e6  # change of a buffer's entry, relative to max(1, its largest entry)


def not_finite(form: Form, model: Mapping[str, Tensor]) -> str | None:
    """Return the first sent tensor with NaN, Inf or, if compressed, values outside float32."""
    for member in form.members:
        if member.role != "local":
            value = model[member.name].detach()
            if not bool((value.to(torch.float32) if member.role == "coded" else value).isfinite().all()):
                return member.name
    return None


def check_update(update: Tensor, model: Tensor) -> float:
    """Return the update's norm, or raise `Refused` if it is too large."""
    norm = float(update.double().norm())
    most = LARGEST * max(1.0, float(model.double().norm()))
    if not norm <= most:
        raise Refused("too large", f"the update's norm is {norm:.4g}, the limit is {most:.4g}")
    return norm


def check_buffers(buffers: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    for name, value in buffers.items():
        if not bool(value.isfinite().all()):
            raise Refused("not finite", "a buffer holds NaN or Inf")
        if value.numel():
            was = before[name].double()
            moved, most = (value.double() - was).abs().max(), FARTHEST * was.abs().max().clamp(min=1)
            if not moved <= most:
                raise Refused("too large", f"buffer {name!r} changed by {moved:.4g}, the limit is {most:.4g}")


def check_fits(proposed: Mapping[str, Tensor]) -> None:
    """Raise `Refused` if a model overflows, as half precision may."""
    for name, value in proposed.items():
        if not bool(value.isfinite().all()):
            raise Refused("too large", f"{name!r} and its update do not fit in {value.dtype}")
