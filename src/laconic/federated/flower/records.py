"""Conversion between Flower's arrays, tensors and wires.

A wire is one array of an `ArrayRecord`: `Array("uint8", (n,), "laconic.v1", bytes)`. A client without a model
also gets the form, in a `ConfigRecord`.
"""

from __future__ import annotations

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from laconic.core.errors import SpecError
from laconic.federated.form import Form, Tensors
from laconic.federated.message import Refused

STYPE = "laconic.v1"
WIRE, FORM = (
    "laconic",
    "laconic.form",
)  # WIRE: an array, and by default its record; FORM: a record
NEEDS_WHOLE = "laconic needs the whole model"  # start of a client's error message
SECAGG = ("secaggplus_configs", "secaggplus_state")  # of Flower's secure aggregation


def tensors_of(record: ArrayRecord) -> Tensors:
    """Return the arrays of a record as CPU tensors. Raises `SpecError` if one is not a tensor."""
    return {name: _tensor(name, array) for name, array in record.items()}


def _tensor(name: str, array: Array) -> Tensor:
    try:
        return torch.from_numpy(array.numpy())
    except (TypeError, ValueError, OSError, EOFError) as error:
        raise SpecError(f"array {name!r} ({array.dtype}, {array.stype}) is not a tensor: {error}") from error


def record_of(tensors: Tensors) -> ArrayRecord:
    return ArrayRecord({name: Array(value.contiguous().numpy()) for name, value in tensors.items()})


def rounded(tensors: Tensors, form: Form) -> Tensors:
    """Convert tensors to the model's dtypes: a mean of integers is not an integer."""
    dtypes = {member.name: member.dtype for member in form.members}

    def as_before(name: str, value: Tensor) -> Tensor:
        dtype = dtypes.get(name, value.dtype)
        if value.is_floating_point() and not dtype.is_floating_point:
            value = value.round()
        return value.to(dtype)

    return {name: as_before(name, value) for name, value in tensors.items()}


def packed(wire: Tensor) -> ArrayRecord:
    raw = wire.numpy().tobytes()
    return ArrayRecord({WIRE: Array("uint8", (len(raw),), STYPE, raw)})


def form_record(form: Form) -> ConfigRecord:
    return ConfigRecord({"form": form.text})


def is_packed(record: ArrayRecord) -> bool:
    return WIRE in record and record[WIRE].stype == STYPE


def unpacked(record: ArrayRecord) -> Tensor:
    """Return the wire of a record, uint8 (n,). Raises `Refused` unless it holds exactly one."""
    if not is_packed(record):
        kinds = sorted({array.stype for array in record.values()})
        raise Refused(
            "not compressed",
            f"arrays of {', '.join(kinds) or 'no kind'} arrived instead of {STYPE}: put"
            " laconic.federated.mod() first in the mods of this client's ClientApp",
        )
    array = record[WIRE]
    if len(record) != 1 or array.dtype != "uint8" or tuple(array.shape) != (len(array.data),):
        raise Refused("malformed", f"one array of {len(array.data)} bytes is expected, got {_said(record)}")
    return torch.frombuffer(bytearray(array.data) or bytearray(1), dtype=torch.uint8)[: len(array.data)]


def _said(record: ArrayRecord) -> str:
    return ", ".join(f"{name[:40]!r} {array.dtype[:20]} {array.shape}" for name, array in record.items())[
        :200
    ]


def form_in(content: RecordDict) -> Form | None:
    record = content.config_records.get(FORM)
    return None if record is None else Form.read(str(record.get("form")))


def only_arrays(content: RecordDict) -> tuple[str, ArrayRecord]:
    records = list(content.array_records.items())
    if len(records) != 1:
        raise Refused("malformed", f"one ArrayRecord is expected, got {len(records)}")
    return records[0]


def nbytes_of(record: ArrayRecord) -> int:
    return sum(len(array.data) for array in record.values())
