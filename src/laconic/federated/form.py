"""Form of a model: compressed, uncompressed and local tensors.

Parameters are compressed, in a flat float32 buffer. BatchNorm's statistics and integers are sent bit for bit,
or stay local.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from laconic.core.errors import SpecError, WireError
from laconic.core.framing import as_bytes
from laconic.core.layout import Layout

Buffers = Literal["send", "local"] | Collection[str]
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # last part of a buffer's name
Tensors = dict[str, Tensor]
ROLES = ("coded", "sent", "local")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    )
}


@dataclass(frozen=True)
class Member:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: Literal["coded", "sent", "local"]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Form:
    """Ordered tensors of a model. Two sides are compatible if fingerprints are equal."""

    members: tuple[Member, ...]

    @classmethod
    def of(cls, model: Mapping[str, Tensor], buffers: Buffers = "send") -> Form:
        """Return the form of a `state_dict()`.

        `buffers`: 'send' or 'local', for integers and BatchNorm's statistics, by name; or names of the local
        tensors. Raises `SpecError` if no tensor is compressed, one is complex, or a name is missing.
        """
        local = set() if isinstance(buffers, str) else set(buffers)
        if isinstance(buffers, str) and buffers not in ("send", "local"):
            raise SpecError(f"buffers must be 'send', 'local' or names of tensors, got {buffers!r}")
        if unknown := sorted(local - set(model)):
            raise SpecError(f"buffers names {unknown[0]!r}; the model has {', '.join(model)}")

        def role(name: str, value: Tensor) -> Literal["coded", "sent", "local"]:
            if value.is_complex():
                raise SpecError(f"{name} is {value.dtype}: pass its real and imaginary parts as two tensors")
            if name in local:
                return "local"
            if value.is_floating_point() and not name.endswith(STATISTICS):
                return "coded"
            return "local" if buffers == "local" else "sent"

        members = tuple(
            Member(name, tuple(value.shape), value.dtype, role(name, value)) for name, value in model.items()
        )
        form = cls(members)
        if not form.layout.numel:
            raise SpecError("this model has no floating-point parameter to compress")
        return form

    @property
    def text(self) -> str:
        return json.dumps(
            [
                [member.name, member.shape, str(member.dtype).removeprefix("torch."), member.role]
                for member in self.members
            ],
            separators=(",", ":"),
        )

    @classmethod
    def read(cls, text: str) -> Form:
        """Parse untrusted text. Raises `WireError`."""
        try:
            members = tuple(_member(*each) for each in json.loads(text))
        except (TypeError, ValueError, KeyError, RecursionError) as error:
            raise WireError(f"this is not the form of a model: {error}") from error
        form = cls(members)
        if len({member.name for member in members}) != len(members) or not form.layout.numel:
            raise WireError(
                "this is not the form of a model: a duplicate name, or no floating-point parameter"
            )
        return form

    @cached_property
    def layout(self) -> Layout:
        return Layout.of((member.name, member.shape) for member in self._with("coded"))

    @cached_property
    def fingerprint(self) -> bytes:
        text = repr([(member.name, member.shape, str(member.dtype), member.role) for member in self.members])
        return hashlib.blake2b(text.encode(), digest_size=8).digest()

    @cached_property
    def local_names(self) -> frozenset[str]:
        return frozenset(member.name for member in self._with("local"))

    @cached_property
    def carried_nbytes(self) -> int:
        return sum(member.nbytes for member in self._with("sent"))

    @cached_property
    def local_nbytes(self) -> int:
        return sum(member.nbytes for member in self._with("local"))

    def identity(self, first: Mapping[str, Tensor] | None) -> bytes:
        """Return an 8-byte hash of the form and a shared first model."""
        if first is None:
            return self.fingerprint
        values = self.pack(first, "coded").numpy().tobytes()
        return hashlib.blake2b(self.fingerprint + values, digest_size=8).digest()

    def flat(self, model: Mapping[str, Tensor]) -> Tensor:
        """Copy the compressed tensors to float32 (n,). Raises `SpecError` for another form."""
        self.check(model)
        flat = torch.empty(self.layout.numel, dtype=torch.float32, device="cpu")
        for entry in self.layout:
            flat[entry.offset : entry.offset + entry.numel] = model[entry.name].detach().reshape(-1)
        return flat

    def check(self, model: Mapping[str, Tensor]) -> None:
        if missing := [member.name for member in self.members if member.name not in model]:
            raise SpecError(f"the model has no tensor {missing[0]!r}, which it had before")
        if more := sorted(set(model) - {member.name for member in self.members}):
            raise SpecError(f"the model has a tensor {more[0]!r}, which it did not have before")
        for member in self.members:
            if tuple(model[member.name].shape) != member.shape:
                raise SpecError(
                    f"{member.name} has shape {tuple(model[member.name].shape)}, before it had {member.shape}"
                )

    def shown(self, flat: Tensor) -> Tensor:
        if all(member.dtype == torch.float32 for member in self._with("coded")):
            return flat
        return self.flat_of(self.coded(flat))

    def coded(self, flat: Tensor) -> Tensors:
        """Return copies of the compressed tensors from flat float32 (n,)."""
        dtypes = {member.name: member.dtype for member in self.members}
        return {
            entry.name: flat[entry.offset : entry.offset + entry.numel]
            .view(entry.shape)
            .to(dtypes[entry.name], copy=True)
            for entry in self.layout
        }

    def flat_of(self, coded: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([coded[name].detach().reshape(-1).to(torch.float32) for name in self.layout.names])

    def whole(self, flat: Tensor, others: Mapping[str, Tensor]) -> Tensors:
        tensors = {**others, **self.coded(flat)}
        return {member.name: tensors[member.name] for member in self.members}

    def pack(self, model: Mapping[str, Tensor], *roles: str) -> Tensor:
        """Return the bytes of the tensors of these roles, uint8 (m,)."""
        parts = [
            as_bytes(model[member.name].detach().to("cpu", member.dtype).contiguous().reshape(-1))
            for member in self._with(*roles)
        ]
        return torch.cat([torch.empty(0, dtype=torch.uint8, device="cpu"), *parts])

    def unpack(self, wire: Tensor, *roles: str) -> Tensors:
        """Reverse `pack`. Raises `WireError` for a wrong number of bytes."""
        members = self._with(*roles)
        expected = sum(member.nbytes for member in members)
        if wire.numel() != expected:
            raise WireError(f"buffers fill {expected} bytes, got {wire.numel()}")
        parts = torch.split(wire, [member.nbytes for member in members]) if members else ()
        return {
            member.name: part.clone().view(member.dtype).view(member.shape)
            for member, part in zip(members, parts, strict=True)
        }

    def pick(self, model: Mapping[str, Tensor], *roles: str) -> Tensors:
        return {
            member.name: model[member.name].detach().to("cpu", member.dtype, copy=True)
            for member in self._with(*roles)
        }

    def _with(self, *roles: str) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.role in roles)


def _member(name: Any, shape: Any, dtype: Any, role: Any) -> Member:
    if not isinstance(name, str) or role not in ROLES:
        raise ValueError(f"a tensor {name!r} of role {role!r}")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{name} of shape {shape}")
    if role == "coded" and not DTYPES[dtype].is_floating_point:
        raise ValueError(f"{name} of {dtype} cannot be compressed")
    return Member(name, tuple(shape), DTYPES[dtype], role)
