"""The saved state of a pipeline's buffers: what a rank needs to go on as if it had never stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.core.errors import StateError
from laconic.pipeline.changes import Changes
from laconic.pipeline.message import digest
from laconic.pipeline.step import Step

FORMAT = 1


@dataclass(frozen=True)
class Buffer:
    """One boundary's buffer on one side: bool (samples,), and uint8 (seen samples, bytes of one)."""

    seen: Tensor
    rows: Tensor

    @classmethod
    def of(cls, channel: Changes) -> Buffer:
        """A copy of a channel's."""
        rows = channel.memory.rows(channel.seen) if channel.opened else torch.zeros(0, 0, dtype=torch.uint8)
        return cls(channel.seen.clone(), rows)

    def into(self, channel: Changes) -> None:
        """Continue from here. Raises `StateError` if it is of another shape."""
        if not len(self.rows):
            return
        if self.rows.shape[1] != channel.memory.nbytes:
            raise StateError(
                f"a saved sample fills {self.rows.shape[1]} bytes, here {channel.memory.nbytes}: the model or"
                " the length of sequences has changed; handle.forget() lets buffers be filled anew"
            )
        channel.memory.load(self.seen, self.rows)
        channel.seen.copy_(self.seen)


def saved(identity: Mapping[str, Any], step: int, buffers: Mapping[str, Buffer]) -> dict[str, Any]:
    """Plain numbers, strings and tensors; the rank is in the tensors' keys."""
    rank = identity["rank"]
    tensors = {f"rank{rank}/{name}/seen": buffer.seen for name, buffer in buffers.items()}
    tensors |= {f"rank{rank}/{name}/rows": buffer.rows for name, buffer in buffers.items()}
    return {"format": FORMAT, **identity, "step": step, "tensors": tensors}


def loaded(state: Mapping[str, Any], identity: Mapping[str, Any]) -> dict[str, Buffer]:
    """The buffers of a state, by boundary. Raises `StateError` if it belongs elsewhere."""
    for key, value in {"format": FORMAT, **identity}.items():
        if key not in state:
            raise StateError(f"this is no state of a pipeline's handle: it has no {key!r}")
        if state[key] != value:
            raise StateError(
                f"the saved state is of {key} {state[key]!r}, this handle has {value!r}: save and load one"
                " file a rank, with the same call of compress"
            )
    tensors = {key.partition("/")[2]: tensor for key, tensor in state["tensors"].items()}
    names = [key.removesuffix("/seen") for key in tensors if key.endswith("/seen")]
    return {name: Buffer(tensors[f"{name}/seen"], tensors[f"{name}/rows"]) for name in names}


def agree_on(comm: Comm, step: Step, channels: Sequence[Changes], pipeline: int) -> None:
    """Raise on every rank unless all of a pipeline have the same step, ids and visited samples.

    Before anything is sent, for backends on which a message of another length than its receiver expects is a
    hang. `pipeline`: its number, by which the ranks of its replicas are told apart.
    """
    step.end(comm)
    ids = b"" if step.ids is None else step.ids.numpy().tobytes()
    visited = sorted({digest(each.seen.numpy().tobytes()) for each in channels})
    mine = json.dumps([pipeline, [step.number, digest(ids), visited]]).encode()
    texts = comm.all_gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    known: dict[int, tuple[int, Any]] = {}
    for rank, text in enumerate(texts):
        which, said = json.loads(bytes(text.tolist()))
        first, other = known.setdefault(which, (rank, said))
        if said != other:
            raise StateError(
                f"ranks {first} and {rank} disagree about the step, sample ids or which samples were seen:"
                " give all ranks the same ids, and load all ranks' states of one checkpoint"
            )
