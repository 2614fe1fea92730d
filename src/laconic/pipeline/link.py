"""Link: a codec between two ranks, for model-parallel scripts without a schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.codecs.dense import Dense
from laconic.comm.naming import backends_of, host_or, wire_device
from laconic.core.codec import Codec
from laconic.core.errors import AttachError, LaconicError, PeerError, WireError
from laconic.exchange.method import lift_codec
from laconic.pipeline.channel import Channel, Coded, Plain, Visit
from laconic.pipeline.links import Direction
from laconic.pipeline.message import digest
from laconic.pipeline.offer import HEADER, Offer, State
from laconic.pipeline.stats import Stats, Traffic


def link(
    codec: str | Codec,
    *,
    backward: str | Codec | None = None,
    group: dist.ProcessGroup | None = None,
    seed: int = 0,
) -> Link:
    """Return a differentiable, compressed send and receive.

        link = laconic.pipeline.link("minmax(bits=4)", backward="minmax(bits=8)")
        token = link.send(first_half(x), to=1); token.backward()                      # rank 0
        loss_fn(second_half(link.receive((32, 256), source=0)), y).backward()         # rank 1

    Calls block and match in order. A sender waits until its tensor is received: call `backward` only after
    all tensors of a step were sent, else two senders wait for each other.

    Costs a round trip per tensor: a 24-byte offer and a 24-byte answer, so that both ends report a
    disagreement. A gradient has no answer, and is sent only if both ends want it.

    Args:
        codec: codec or selector of the sent tensor.
        backward: codec or selector of its gradient. None: the same.
        group: process group in which ranks are numbered. None: all ranks.
        seed: seed of random rounding.

    Raises:
        SpecError: The spec is not a codec or selector.
    """
    forward = lift_codec(codec)
    return Link(forward, forward if backward is None else lift_codec(backward), group, seed)


class Link:
    """Both directions of one rank, made with equal arguments on both ranks."""

    def __init__(
        self, forward: Codec, backward: Codec, group: dist.ProcessGroup | None = None, seed: int = 0
    ) -> None:
        self._codecs: dict[Direction, Codec] = {"forward": forward, "backward": backward}
        self._group, self._seed = group, seed
        self._traffic = Traffic()
        self._turns: dict[tuple[int, int], int] = {}
        self._awaited: dict[int, WeakValueDictionary[int, Awaited]] = {}
        self.rank = dist.get_rank(group)
        self._backends = backends_of(group) if self.rank >= 0 else {}

    def __repr__(self) -> str:
        return f"link({self._codecs['forward']!r}, backward={self._codecs['backward']!r})"

    def send(self, x: Tensor, to: int) -> Tensor:
        """Send x to a rank that calls `receive`.

        Args:
            x: floating point, of any shape, finite.
            to: the other rank.

        Returns:
            A scalar zero, which requires a gradient if x does. Its `backward()` waits for the gradient of x,
            until the group's time-out if the receiver does not use the tensor. It raises `PeerError` if the
            receiver has disabled gradients.

        Raises:
            NonFiniteError, AttachError: x holds NaN, Inf or integers; the receiver raises `PeerError`.
            WireError: The two sides disagree; the receiver raises it too.
        """
        token: Tensor = _Send.apply(x, self, to, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
        return token

    def receive(
        self,
        shape: Sequence[int],
        source: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Receive a tensor from a rank; `backward` sends its gradient back.

        Args:
            shape, dtype: of the sent tensor.
            source: the other rank.
            device: device of the result.

        Returns:
            A tensor, which requires a gradient if gradients are enabled and the sent tensor requires one.

        Raises:
            PeerError: The sender could not send it.
            WireError: The two sides disagree; the sender raises it too.
        """
        wanted = torch.is_grad_enabled()
        out = torch.empty(tuple(shape), dtype=dtype, device=device)
        turn = self.begin(source, self.rank)
        if not (self.get(out, source, turn, wanted) and wanted):
            return out
        start, arrived = torch.zeros((), dtype=dtype, device=device, requires_grad=True), _Arrived(out)
        received: Tensor = _Receive.apply(start, arrived, self, source, turn)  # type: ignore[no-untyped-call]
        return received

    def stats(self) -> Stats:
        """Return this rank's statistics; a step is one tensor sent or received."""
        return Stats.of(self._traffic, steps=sum(self._turns.values()))

    def begin(self, source: int, to: int) -> int:
        turn = self._turns.get((source, to), 0)
        self._turns[source, to] = turn + 1
        return turn

    def put(self, direction: Direction, x: Tensor, to: int, turn: int, wanted: bool = False) -> bool:
        """Send x, or inform the other side and raise. Return whether both want a gradient."""
        channel, visit, agreed = self._channel(direction, x.shape, x.dtype, self.rank, to, turn)
        try:
            if not (x.is_floating_point() or isinstance(channel, Plain)):
                raise AttachError(
                    f"a tensor of {x.dtype}, but codecs are for floating-point numbers: send it over a link"
                    " of dense(), or cast it to float32"
                )
            body = channel.encode(x, visit)
        except Exception as error:
            self._tell(direction, Offer(State.FAILED), x.device, to, dense=0)
            if isinstance(error, LaconicError):
                raise type(error)(f"rank {self.rank}, to rank {to}, {direction}: {error}") from error
            raise
        offer = Offer(State.OFFERED, wanted, body.numel(), agreed)
        self._tell(direction, offer, x.device, to, dense=x.nbytes)
        answer = self._hear(direction, x.device, to) if direction == "forward" else offer
        if answer.state is State.REFUSED:
            raise WireError(self._unlike(channel, to))
        if body.numel():
            going = body.contiguous().to(wire_device(x.device, self._backends))
            dist.send(going, group=self._group, group_dst=to)
            self._traffic.sent(direction, body.numel(), 0, 0.0)
        return wanted and answer.gradient

    def get(self, out: Tensor, source: int, turn: int, wanted: bool) -> bool:
        channel, visit, agreed = self._channel("forward", out.shape, out.dtype, source, self.rank, turn)
        offer = self._offered("forward", out.device, source)
        alike = offer.agreed == agreed and offer.nbytes <= channel.most
        answer = Offer(State.OFFERED if alike else State.REFUSED, wanted)
        self._tell("forward", answer, out.device, source, dense=0)
        if not alike:
            raise WireError(self._unlike(channel, source))
        self._body("forward", offer, channel, visit, out, source)
        return offer.gradient

    def awaits(self, x: Tensor, to: int, turn: int) -> Awaited:
        """Return a sent tensor's `Awaited`, which receives gradients as long as it exists."""
        channel, visit, agreed = self._channel("backward", x.shape, x.dtype, to, self.rank, turn)
        awaited = Awaited(channel, visit, x.device)
        self._awaited.setdefault(to, WeakValueDictionary())[agreed] = awaited
        return awaited

    def gradient(self, awaited: Awaited, source: int) -> Tensor:
        """Return the gradient from a rank, and store others that arrive first."""
        known = self._awaited[source]
        while not awaited.came:
            offer = self._offered("backward", awaited.device, source)
            owner = known.get(offer.agreed)
            if owner is None or offer.nbytes > owner.channel.most:
                raise WireError(self._unlike(awaited.channel, source))
            out = torch.empty(owner.channel.shape, dtype=owner.channel.dtype, device=owner.device)
            self._body("backward", offer, owner.channel, owner.visit, out, source)
            owner.came.append(out)
        return awaited.came.popleft()

    def _offered(self, direction: Direction, device: torch.device, source: int) -> Offer:
        offer = self._hear(direction, device, source)
        if offer.state is State.FAILED:
            raise PeerError(
                f"rank {self.rank}: rank {source} could not send its tensor: see the error of that rank"
            )
        return offer

    def _body(
        self, direction: Direction, offer: Offer, channel: Channel, visit: Visit, out: Tensor, source: int
    ) -> None:
        body = torch.empty(offer.nbytes, dtype=torch.uint8, device=wire_device(out.device, self._backends))
        if offer.nbytes:
            dist.recv(body, group=self._group, group_src=source)
            self._traffic.received(direction, offer.nbytes, 0.0)
        channel.decode_(body.to(out.device), out, visit)

    def _tell(self, direction: Direction, offer: Offer, device: torch.device, to: int, *, dense: int) -> None:
        dist.send(offer.message(host_or(device, self._backends)), group=self._group, group_dst=to)
        self._traffic.sent(direction, HEADER.size, dense, 0.0)

    def _hear(self, direction: Direction, device: torch.device, source: int) -> Offer:
        message = torch.empty(HEADER.size, dtype=torch.uint8, device=host_or(device, self._backends))
        dist.recv(message, group=self._group, group_src=source)
        self._traffic.received(direction, HEADER.size, 0.0)
        return Offer.of(message)

    def _unlike(self, channel: Channel, other: int) -> str:
        return (
            f"rank {self.rank} has {channel.dtype} of {tuple(channel.shape)} by {self!r}, and rank {other}"
            " another shape, dtype, codec or seed, or is at another turn: make links with equal arguments on"
            " both ranks, pass the shape and dtype of the sent tensor, and match calls in order"
        )

    def _channel(
        self, direction: Direction, shape: torch.Size, dtype: torch.dtype, source: int, to: int, turn: int
    ) -> tuple[Channel, Visit, int]:
        name, codec, visit = f"{source}>{to}:{direction}", self._codecs[direction], Visit(turn, 0, None)
        channel: Channel = Coded(name, shape, dtype, self._seed, codec)
        if isinstance(codec, Dense):
            channel = Plain(name, shape, dtype, self._seed)
        return channel, visit, digest(*channel.agreed(visit), repr(self), str(self._seed))


@dataclass(eq=False)
class Awaited:
    """Gradients of one sent tensor."""

    channel: Channel
    visit: Visit
    device: torch.device
    came: deque[Tensor] = field(default_factory=deque)


@dataclass(frozen=True)
class _Arrived:
    """Wrapper that hides a received tensor from autograd."""

    out: Tensor


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Link, to: int, enabled: bool) -> Tensor:
        ctx.ends, ctx.to, ctx.awaited = ends, to, None
        turn = ends.begin(ends.rank, to)
        if ends.put("forward", x, to, turn, enabled and ctx.needs_input_grad[0]):
            ctx.awaited = ends.awaits(x, to, turn)
        return torch.zeros((), dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.awaited is None:
            raise PeerError(
                f"rank {ctx.to} received this tensor without gradients, so none is sent back: call"
                " receive with gradients enabled, or send a tensor that requires none"
            )
        return ctx.ends.gradient(ctx.awaited, ctx.to), None, None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: Tensor, arrived: _Arrived, ends: Link, source: int, turn: int) -> Tensor:
        ctx.ends, ctx.source, ctx.turn = ends, source, turn
        return arrived.out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        ctx.ends.put("backward", grads[0], ctx.source, ctx.turn)
        return grads[0].new_zeros(()), None, None, None, None
