"""Arrays of Flower's messages as tensors, and wires as arrays.

A wire is one array of an `ArrayRecord`: `Array("uint8", (n,), "laconic.v1", bytes)`. To a client that holds
no model yet the text of the model's form travels beside it, in a `ConfigRecord`.
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
)  # WIRE: an array and, where it has no other name, its record; FORM: a record
NEEDS_WHOLE = "laconic needs the whole model"  # how a client's error begins that asks for it
SECAGG = ("secaggplus_configs", "secaggplus_state")  # of Flower's secure aggregation


def tensors_of(record: ArrayRecord) -> Tensors:
    """The arrays of a record, on the CPU.

    Raises:
        SpecError: An array is no tensor's: of strings, of another serialisation.
    """
    return {name: _tensor(name, array) for name, array in record.items()}


def _tensor(name: str, array: Array) -> Tensor:
    try:
        return torch.from_numpy(array.numpy())
    except (TypeError, ValueError, OSError, EOFError) as error:
        raise SpecError(f"array {name!r} ({array.dtype}, {array.stype}) is no tensor: {error}") from error


def record_of(tensors: Tensors) -> ArrayRecord:
    """The reverse of `tensors_of`."""
    return ArrayRecord({name: Array(value.contiguous().numpy()) for name, value in tensors.items()})


def rounded(tensors: Tensors, form: Form) -> Tensors:
    """A strategy's tensors in the model's dtypes: a mean of integers is no integer."""
    dtypes = {member.name: member.dtype for member in form.members}

    def as_before(name: str, value: Tensor) -> Tensor:
        dtype = dtypes.get(name, value.dtype)
        if value.is_floating_point() and not dtype.is_floating_point:
            value = value.round()
        return value.to(dtype)

    return {name: as_before(name, value) for name, value in tensors.items()}


def packed(wire: Tensor) -> ArrayRecord:
    """A record of a wire uint8 (n,)."""
    raw = wire.numpy().tobytes()
    return ArrayRecord({WIRE: Array("uint8", (len(raw),), STYPE, raw)})


def told(form: Form) -> ConfigRecord:
    """A record of a model's form."""
    return ConfigRecord({"form": form.text})


def is_packed(record: ArrayRecord) -> bool:
    """Whether a record says that it holds a wire."""
    return WIRE in record and record[WIRE].stype == STYPE


def unpacked(record: ArrayRecord) -> Tensor:
    """The wire of a record, uint8 (n,).

    Raises:
        Refused: It holds none, or more than one.
    """
    if not is_packed(record):
        kinds = sorted({array.stype for array in record.values()})
        raise Refused(
            "not compressed",
            f"arrays of {', '.join(kinds) or 'no kind'} came instead of {STYPE}: put laconic.federated.mod()"
            " first into the mods of this client's ClientApp",
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
    """The form that a message tells, if it tells one. Raises `WireError` if it is none."""
    record = content.config_records.get(FORM)
    return None if record is None else Form.read(str(record.get("form")))


def only_arrays(content: RecordDict) -> tuple[str, ArrayRecord]:
    """The name of a message's one ArrayRecord, and the record. Raises `Refused` if there is not one."""
    records = list(content.array_records.items())
    if len(records) != 1:
        raise Refused("malformed", f"one ArrayRecord is expected, got {len(records)}")
    return records[0]


def nbytes_of(record: ArrayRecord) -> int:
    """Bytes of its arrays as they travel."""
    return sum(len(array.data) for array in record.values())
