"""Server: both directions compressed, as through a parameter server; every rank serves a share.

As in STC (Sattler et al. 2019, arXiv:1903.02891), natural compression both ways (Horvath et al. 2019,
arXiv:1905.10988) and 1-bit Adam (Tang et al. 2021, arXiv:2102.02888). Per tensor, or piece of a large one,
on its server:

    x = e + 1/N * sum over ranks r = 0..N-1, in this order, of decode(up_r)
    down = C(x)        e = x - decode(down)        mean = decode(down), on every rank

The residual e exists only if `down` needs feedback; else e = 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.comm.messages import Sent, SentMessage, SentParts, add_messages_, encoded, encoded_parts
from laconic.comm.skippable import all_to_all_or_skip, gather_or_skip
from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.layout import Entry, Layout, PerLayout, Segments
from laconic.core.spec import Status
from laconic.core.turn import Turn, mix
from laconic.feedback.memory import Memory, Pending
from laconic.feedback.memory.contraction import safe_gain
from laconic.reducers import BoundReducer, Reducer
from laconic.reducers.server.deal import SHORTEST, Share, deal, homes

KIND = "once/server"  # of the residual, in a saved state
ANSWER = 0x5E71  # separates the keys of answers


@dataclass(frozen=True, repr=False)
class Server(Reducer):
    """mean = decode(down(e + average of decode(up_r))): codec `up` to the servers, codec `down` back.

    Every rank serves equally many elements (see `deal`); each piece of a large tensor is a tensor for the
    codecs. Payload: for each piece the up-message or, on its server, the down-message; in total (N - 1)/N of
    `up` and of `down`, and 2 (N - 1) headers.

    >>> from laconic.core.spec import parse
    >>> parse("server(sparse(topk(density=0.01)), cast('bf16'))")
    server(sparse(topk(density=0.01)), down=cast(dtype='bf16'))
    """

    up: Codec
    down: Codec

    paper: ClassVar[str] = "Sattler et al. 2019, arXiv:1903.02891"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "felisat/federated-learning"
    examples: ClassVar[tuple[str, ...]] = (
        "server(sparse(topk(density=0.1)), sparse(topk(density=0.1)))",
        "server(cast('bf16'), cast('bf16'))",
        "server(sparse(randomk(density=0.1)), dense())",
    )

    def __post_init__(self) -> None:
        for name, codec in (("up", self.up), ("down", self.down)):
            if not isinstance(codec, Codec):
                raise SpecError(
                    f"server needs a codec for each direction, such as cast('bf16'), got {name}={codec!r}"
                )

    @property
    def exact_mean(self) -> bool:
        return self.down.needs_feedback or self.down.lossless

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        if self.down.needs_feedback:
            try:
                safe_gain(self.down, layout)
            except SpecError as error:
                raise SpecError(f"server does not support down={self.down!r}: {error}") from None
        return _Server(self, layout, comm)

    def nbytes(self, layout: Layout) -> int:
        return sum(max(most_nbytes(codec, entry) for codec in (self.up, self.down)) for entry in layout)

    def feedback_codec(self) -> Codec:
        return self.up


class _Server(BoundReducer):
    def __init__(self, spec: Server, layout: Layout, comm: Comm) -> None:
        self._spec = spec
        self._layout = layout
        self._comm = comm
        self._homes = homes(layout, comm.size)
        self._partition = PerLayout(lambda bucket: deal(bucket, self._homes, comm.rank, comm.size))
        served = Layout(tuple(share.of(entry) for entry, share in self._served()))
        self._residual = Memory(KIND, served) if spec.down.needs_feedback else None
        self._pending = Pending(self._finish)

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        self._pending.finish_before(turn.step)
        comm, partition, device = self._comm, self._partition(layout), out.device
        up, down = self._spec.up.at(turn.step), self._spec.down.at(turn.step)
        ranges = partition.to_all.ranges
        due = [len(part) > 0 for part in partition.parts]
        own, joined = None, None
        if x is not None:
            own, joined = encoded_parts(x, partition.to_all, up, turn)
        requests = all_to_all_or_skip(comm, own, device, due)
        answer = None if requests is None else self._serve(requests, partition.home, up, down, turn)
        answers = gather_or_skip(comm, answer, device, due)
        if own is None or answers is None:
            self.put_back(layout)
            return None
        messages = (SentMessage(down, *each) for each in zip(answers, ranges, strict=True))
        add_messages_(layout.segments.zero_(out), enumerate(messages), alpha)
        return joined or SentParts(tuple(SentMessage(up, *each) for each in zip(own, ranges, strict=True)))

    def _serve(
        self, requests: Sequence[Tensor], home: Layout, up: Codec, down: Codec, turn: Turn
    ) -> Tensor | None:
        segments, device = home.segments, requests[0].device
        if self._residual is None:
            x = torch.zeros(segments.end, dtype=torch.float32, device=device)
        else:
            x = self._residual.flat(home, device).clone()
        messages = (SentMessage(up, request, segments) for request in requests)
        add_messages_(x, enumerate(messages), 1 / self._comm.size)
        if not kernels.all_finite(x, segments):
            return None
        # with the up-message's keys the two roundings would not be independent
        answer = encoded(x, home, down, replace(turn, seed=mix(turn.seed, ANSWER)))
        if self._residual is not None and home.numel:
            self._pending.add(down.decode_segments_add_(answer, segments, x, -1.0), home, turn.step)
        return answer

    def _finish(self, residual: Tensor, home: Layout) -> None:
        assert self._residual is not None
        self._residual.held(home).copy_(residual)

    def put_back(self, layout: Layout) -> None:
        self._pending.drop(self._partition(layout).home)

    @property
    def remembers(self) -> bool:
        return self._residual is not None

    @property
    def holds_back(self) -> bool:
        return self._residual is not None

    def discard(self) -> None:
        self._pending.clear()
        if self._residual is not None:
            self._residual.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        self._pending.finish_all()
        if self._residual is None:
            return {}
        device = self._residual.device
        state = {
            f"{KIND}/{entry.name}": torch.zeros(entry.shape, dtype=torch.float32, device=device)
            for entry in self._layout
        }
        for entry, share in self._served():
            held = self._residual.tensor(share.of(entry).name)
            if held is not None:
                state[f"{KIND}/{entry.name}"].view(-1)[share.begin : share.end] = held
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self._residual is None:
            super().load_state_dict(state)
            return
        Memory(KIND, self._layout).check(state)
        self._pending.finish_all()
        for entry, share in self._served():
            value = state[f"{KIND}/{entry.name}"].to(torch.float32).flatten()
            self._residual.set(share.of(entry), value[share.begin : share.end])

    def _served(self) -> Iterator[tuple[Entry, Share]]:
        for entry in self._layout:
            yield from ((entry, share) for share in self._homes[entry.name] if share.rank == self._comm.rank)


def most_nbytes(codec: Codec, entry: Entry) -> int:
    pieces = max(1, entry.numel // SHORTEST)
    each = Segments.whole(-(-entry.numel // pieces))
    return max(1, codec.message_nbytes(Segments.whole(entry.numel)), pieces * codec.message_nbytes(each))
