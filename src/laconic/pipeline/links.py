"""Compressed sends and receives of one stage."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.core.errors import AttachError, StateError
from laconic.pipeline.changes import Changes
from laconic.pipeline.channel import Channel, Plain, Visit
from laconic.pipeline.message import HEADER, PeerFailed, digest, length, opened, sealed
from laconic.pipeline.stats import Traffic
from laconic.pipeline.step import Step

Direction = Literal["forward", "backward"]
Posted = tuple[Channel, Tensor, Tensor, Visit]  # channel, destination, message, visit
T = TypeVar("T")
MakeChannel = Callable[[Direction, str, torch.Size, torch.dtype, bool], Channel]  # last: whether training


@dataclass
class StageLinks:
    """Channels of one stage, created when a tensor is first sent.

    Torch's 1F1B and looped schedules start sends before receives, so on gloo the notice of a ready receive
    queues behind this rank's payload. There each receive is posted when the schedule asks for its op; the
    schedule gets no op, and `arrived` waits.

    `exact`: whether both sides must name one length, as on NCCL. A gloo receiver offers room for the longest
    message; a longer one ends the process.
    """

    stage: Any
    step: Step
    traffic: Traffic
    make: MakeChannel
    exact: bool
    channels: dict[tuple[Direction, str, int], Channel] = field(default_factory=dict)
    tests: dict[tuple[Direction, str, int], Channel] = field(default_factory=dict)  # for evaluation
    void: set[int] = field(default_factory=set)  # micro-batches whose forward pass failed
    _posted: dict[tuple[Direction, int], list[Posted]] = field(default_factory=dict)
    _coming: dict[tuple[Direction, int], list[dist.Work]] = field(default_factory=dict)
    _rooms: dict[tuple[Direction, int, int], Tensor] = field(default_factory=dict)
    _sent: list[Tensor] = field(default_factory=list)

    def begin(self) -> None:
        self._posted.clear()
        self._coming.clear()
        self._sent.clear()
        self.void.clear()

    def send(self, direction: Direction, micro: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        for slot, op in enumerate(ops):
            x: Tensor = op.tensor
            channel, visit = self._channel(direction, "send", slot, x), self._visit(micro)
            began = time.perf_counter()
            room = HEADER.size + channel.room(visit) if self.exact else None
            agreed, body = self._encoded(channel, x, visit, direction)
            op.tensor = sealed(body, agreed, x.device, room)
            self.traffic.sent(direction, op.tensor.numel(), x.nbytes, time.perf_counter() - began)
            self._sent.append(op.tensor)  # alive until sent
        return ops

    def post(self, direction: Direction, micro: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Return the receives for coded bytes; none on gloo."""
        posted = self._posted[direction, micro] = []
        for slot, op in enumerate(ops):
            target: Tensor = op.tensor
            channel, visit = self._channel(direction, "receive", slot, target), self._visit(micro)
            key = (direction, slot, micro)
            most = HEADER.size + channel.most
            if key not in self._rooms or self._rooms[key].numel() < most:
                self._rooms[key] = torch.empty(most, dtype=torch.uint8, device=target.device)
            room = self._rooms[key]
            op.tensor = room[: HEADER.size + channel.room(visit)] if self.exact else room
            posted.append((channel, target, op.tensor, visit))
        if self.exact:
            return ops
        self._coming[direction, micro] = [
            op.op(op.tensor, group=op.group, tag=op.tag, group_src=op.group_peer) for op in ops
        ]
        return []

    def arrived(self, direction: Direction, micro: int) -> None:
        for work in self._coming.pop((direction, micro), ()):
            work.wait()

    def fill(self, direction: Direction, micro: int) -> None:
        for channel, target, message, visit in self._posted.pop((direction, micro), ()):
            began = time.perf_counter()
            with torch.no_grad():
                try:
                    channel.decode_(opened(message, agreement(channel, visit)), target, visit)
                except PeerFailed:
                    self.step.heard = True
                    target.zero_()
                except Exception as error:
                    self.step.fail(error, self._where(direction, visit))
                    target.zero_()
            size = message.numel() if self.exact else length(message)
            self.traffic.received(direction, size, time.perf_counter() - began)

    def _encoded(
        self, channel: Channel, x: Tensor, visit: Visit, direction: Direction
    ) -> tuple[int, Tensor | None]:
        if self.step.failed:
            return 0, None
        try:
            self._check(channel, x, visit)
            with torch.no_grad():
                return agreement(channel, visit), channel.encode(x, visit)
        except Exception as error:
            self.step.fail(error, self._where(direction, visit))
            return 0, None

    def _check(self, channel: Channel, x: Tensor, visit: Visit) -> None:
        if not (x.is_floating_point() or isinstance(channel, Plain)):
            raise AttachError(
                f"a tensor of {x.dtype} crosses this boundary, but codecs are for floating-point numbers:"
                " compute it from kwargs on each stage, or cast it to float32"
            )
        if x.shape != channel.shape or x.dtype != channel.dtype:
            raise StateError(
                f"the tensor was {channel.dtype} of {tuple(channel.shape)}, now it is {x.dtype} of"
                f" {tuple(x.shape)}: batches need one shape: pad or cut sequences, and drop a short last one"
            )
        ids = visit.ids
        if visit.training and isinstance(channel, Changes) and (ids is None or len(ids) != channel.rows):
            given = 0 if ids is None else len(ids)
            raise StateError(
                f"{given} sample ids for a micro-batch of {channel.rows}: pass one id for each sample of the"
                " batch, and make samples the first dimension of every tensor between stages"
            )

    def _channel(self, direction: Direction, side: str, slot: int, tensor: Tensor) -> Channel:
        """Return the channel of a tensor, replaced (unless it stores samples) if torch announces another
        shape.
        """
        training = bool(self.stage.has_backward)
        known = self.channels if training else self.tests
        found = known.get((direction, side, slot))
        shape, dtype = tensor.shape, tensor.dtype
        if direction == "forward" and side == "send":  # the announced shape, even if the tensor differs
            meta = self.stage._stage_meta.outputs[slot]
            shape, dtype = meta.shape, meta.dtype
        other = found is not None and (found.shape, found.dtype) != (shape, dtype)
        if found is None or (other and not (training and isinstance(found, Changes))):
            index, step = self.stage.stage_index, 1 if direction == "forward" else -1
            source = index if side == "send" else index - step
            name = f"{source}>{source + step}:{slot}"
            found = known[direction, side, slot] = self.make(direction, name, shape, dtype, training)
        return found

    def _visit(self, micro: int) -> Visit:
        ids = self.step.ids
        if ids is not None:
            ids = torch.tensor_split(ids, len(self.stage.args_recv_info))[micro]
        return Visit(self.step.number, micro, ids, bool(self.stage.has_backward), may_fail=True)

    def guarded(self, micro: int, what: str, call: Callable[[], T], instead: Callable[[], T]) -> T:
        """Return `call()`, or `instead()` if it raises: all ranks raise at the step's end."""
        try:
            return call()
        except Exception as error:
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error  # torch wraps it
            self.step.fail(cause, f"stage {self.stage.stage_index}, micro-batch {micro}, {what}")
            return instead()

    def _where(self, direction: Direction, visit: Visit) -> str:
        what = "activation" if direction == "forward" else "gradient"
        return f"stage {self.stage.stage_index}, micro-batch {visit.micro}, {what}"


def agreement(channel: Channel, visit: Visit) -> int:
    return digest(*channel.agreed(visit))
