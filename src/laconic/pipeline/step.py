"""State of the current step on a rank, and how all ranks end it together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.comm.gather_text import gather_json
from laconic.core import errors
from laconic.core.errors import LaconicError, PeerError
from laconic.data.sample_ids import sample_ids


@dataclass
class Step:
    """State of a step. A failed rank sends only headers until the end, where all ranks raise.

    Attributes:
        number: training steps before it.
        ids: int64 (batch,) on the CPU, or None.
        failure: first error on this rank.
        heard: whether another rank has failed.
        begun: whether `begin_first` has succeeded.
        foreseen: error known before the step.
        short: whether rows of a short batch were repeated.
    """

    number: int = 0
    ids: Tensor | None = None
    failure: tuple[Exception, str] | None = None
    heard: bool = False
    begun: bool = False
    foreseen: Exception | None = None
    short: bool = False

    @property
    def failed(self) -> bool:
        return self.failure is not None or self.heard

    def foresee(self, error: Exception) -> None:
        self.foreseen = self.foreseen or error

    def begin(self) -> None:
        self.failure, self.heard, self.ids = None, False, None
        foreseen, self.foreseen = self.foreseen, None
        self.short = foreseen is not None
        if foreseen is not None:
            self.fail(foreseen, "")

    def fail(self, error: Exception, where: str) -> None:
        if self.failure is None:
            self.failure = error, f"{where}: {error}" if where else str(error)

    def begin_first(self, comm: Comm, error: Exception | None) -> None:
        """Begin the first step on all ranks: torch first sends shapes, and waits for a failed rank."""
        if not self.begun:
            if error is not None:
                self.fail(error, "")
            self.end(comm)
            self.begun = True

    def end(self, comm: Comm) -> None:
        """End the step: if a rank has failed, raise its error on all.

        All continue from the highest step.
        """
        flag = comm.all_reduce(torch.tensor([self.failed], dtype=torch.int32, device="cpu"), "max")
        if not bool(flag):
            return
        kind, text = ("", "") if self.failure is None else (type(self.failure[0]).__name__, self.failure[1])
        said = gather_json(comm, [kind, text, self.short, self.number])
        cause = None if self.failure is None else self.failure[0]
        self.failure, self.heard = None, False
        self.number, self.short = max(number for *_, number in said), any(short for *_, short, _ in said)
        for rank, (kind, text, *_) in enumerate(said):
            if kind:
                message = f"rank {rank}: {text}; this step's gradients are void: optimizer.zero_grad()"
                raise _class(kind)(message) from cause
        raise PeerError("a message reported that its sender had failed, but no rank has")


def checked_ids(ids: Tensor | Sequence[int] | None, samples: int) -> Tensor:
    return sample_ids(
        ids,
        samples,
        missing="change(...) needs the ids of a batch's samples: handle.step(..., samples=ids), or handle"
        ".samples = ids before schedule.step, on every rank; laconic.data.with_ids(dataset) gives them",
        call="compress",
    )


def _class(name: str) -> type[Exception]:
    found = getattr(errors, name, None)
    if isinstance(found, type) and issubclass(found, LaconicError):
        return found
    return OSError if name in ("OSError", "FileNotFoundError", "PermissionError") else PeerError
