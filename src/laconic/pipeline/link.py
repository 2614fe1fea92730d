"""Link: any codec between two ranks, for model-parallel scripts without a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.codecs.dense import Dense
from laconic.core.codec import Codec
from laconic.core.errors import NonFiniteError, PeerError
from laconic.exchange.method import lift_codec
from laconic.pipeline.channel import Channel, Coded, Plain, Visit
from laconic.pipeline.links import Direction
from laconic.pipeline.message import HEADER, PeerFailed, digest, length, opened, sealed
from laconic.pipeline.stats import Stats, Traffic


def link(
    codec: str | Codec,
    *,
    backward: str | Codec | None = None,
    group: dist.ProcessGroup | None = None,
    seed: int = 0,
) -> Link:
    """A packed send and receive that gradients go back through.

        link = laconic.pipeline.link("minmax(bits=4)", backward="minmax(bits=8)")
        token = link.send(first_half(x), to=1); token.backward()                      # rank 0
        loss_fn(second_half(link.receive((32, 256), source=0)), y).backward()         # rank 1

    Calls block, and match in order. Each message goes once, without memory: for changes by sample see
    `laconic.pipeline.compress`.

    Args:
        codec: any codec or selector, of what is sent.
        backward: of its gradient; default: the same codec.
        group: the ranks' process group; default: all. Ranks are its own.
        seed: of random rounding.

    Raises:
        SpecError: for a spec that is no codec or selector.
    """
    forward = lift_codec(codec)
    return Link(forward, forward if backward is None else lift_codec(backward), group, seed)


class Link:
    """One rank's ends. Made by `laconic.pipeline.link`, with equal arguments on both ranks."""

    def __init__(
        self, forward: Codec, backward: Codec, group: dist.ProcessGroup | None = None, seed: int = 0
    ) -> None:
        self._codecs: dict[Direction, Codec] = {"forward": forward, "backward": backward}
        self._group, self._seed = group, seed
        self._traffic = Traffic()
        self._turns: dict[tuple[str, int, int], int] = {}
        self._exact = dist.get_backend(group) != "gloo"
        self._rank = dist.get_rank(group)

    def send(self, x: Tensor, to: int) -> Tensor:
        """Send x to a rank that calls `receive`.

        Args:
            x: floating point, of any shape, finite.
            to: the other rank.

        Returns:
            A token, a scalar of zero: its `backward()` waits for the gradient of x, and goes on from there.

        Raises:
            NonFiniteError: for NaN and Inf; the receiver raises `PeerError`.
        """
        token: Tensor = _Send.apply(x, self, to)  # type: ignore[no-untyped-call]
        return token

    def receive(
        self,
        shape: Sequence[int],
        source: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Receive what a rank sends. In `backward` its gradient goes back there.

        Args:
            shape, dtype: of what is sent, equal on both ranks.
            source: the other rank.
            device: where it is wanted.

        Returns:
            A tensor that requires a gradient where gradients are enabled.

        Raises:
            PeerError: The sender could not send it.
            WireError: The two sides disagree.
        """
        start = torch.zeros((), dtype=dtype, device=device, requires_grad=torch.is_grad_enabled())
        out: Tensor = _Receive.apply(start, torch.Size(shape), self, source)  # type: ignore[no-untyped-call]
        return out

    def stats(self) -> Stats:
        """Bytes and seconds of this rank since the start; a step is a tensor sent or received."""
        return Stats.of(
            self._traffic, steps=sum(n for (way, *_), n in self._turns.items() if way == "forward")
        )

    def put(self, direction: Direction, x: Tensor, to: int) -> None:
        """One message to a rank. If x cannot be sent, the other side hears that, and this raises."""
        channel, visit = self._next(direction, x.shape, x.dtype, self._rank, to)
        room = HEADER.size + channel.room(visit) if self._exact else None
        body, failure = None, None
        try:
            body = channel.encode(x, visit)
        except NonFiniteError as error:
            failure = NonFiniteError(f"rank {self._rank}, to rank {to}, {direction}: {error}")
        message = sealed(body, digest(*channel.agreed(visit)), x.device, room)
        self._traffic.sent(direction, message.numel(), x.nbytes, 0.0)
        dist.send(message, group=self._group, group_dst=to)
        if failure is not None:
            raise failure

    def get(self, direction: Direction, out: Tensor, source: int) -> Tensor:
        """One message from a rank, decoded to `out`."""
        channel, visit = self._next(direction, out.shape, out.dtype, source, self._rank)
        size = channel.room(visit) if self._exact else channel.most
        message = torch.empty(HEADER.size + size, dtype=torch.uint8, device=out.device)
        dist.recv(message, group=self._group, group_src=source)
        self._traffic.received(direction, message.numel() if self._exact else length(message), 0.0)
        try:
            channel.decode_(opened(message, digest(*channel.agreed(visit))), out, visit)
        except PeerFailed:
            raise PeerError(
                f"rank {self._rank}: rank {source} could not send: its tensor holds NaN or Inf"
            ) from None
        return out

    def _next(
        self, direction: Direction, shape: torch.Size, dtype: torch.dtype, source: int, to: int
    ) -> tuple[Channel, Visit]:
        """The channel of the next message from one rank to another."""
        turn = self._turns.get((direction, source, to), 0)
        self._turns[direction, source, to] = turn + 1
        name, codec = f"{source}>{to}:{direction}", self._codecs[direction]
        if isinstance(codec, Dense):
            return Plain(name, shape, dtype, self._seed), Visit(turn, 0, None)
        return Coded(name, shape, dtype, self._seed, codec), Visit(turn, 0, None)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Link, to: int) -> Tensor:
        ctx.ends, ctx.to, ctx.like = ends, to, torch.empty_like(x, device="meta")
        ctx.device = x.device
        ends.put("forward", x, to)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        out = torch.empty(ctx.like.shape, dtype=ctx.like.dtype, device=ctx.device)
        return ctx.ends.get("backward", out, ctx.to), None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: Tensor, shape: torch.Size, ends: Link, source: int) -> Tensor:
        ctx.ends, ctx.source = ends, source
        return ends.get("forward", start.new_empty(shape), source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.ends.put("backward", grads[0], ctx.source)
        return torch.zeros_like(grads[0].flatten()[:1]).view(()), None, None, None
