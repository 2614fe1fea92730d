"""Time line of a step: backward makes buckets ready, and a thread exchanges them.

    bucket b starts   when it is ready and bucket b - 1 is done
    bucket b is done  its encoding, messages and decoding later
    step              forward + max(backward, last bucket done) + update

Strategies exchange parameters after the update, or during the next step; rules such as 1-bit Adam in the
update. Coding lengthens backward with fewer than two cores per worker, and the CPU time of messages (toll)
always does. Messages beside computing are slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from laconic.tools.plan.network import Network
from laconic.tools.plan.rehearsal import Rehearsed

BUCKET = 25 * 2**20  # bytes, as in DDP
FIRST = 2**20


@dataclass(frozen=True)
class Work:
    """Local work of a worker: seconds of forward, backward and update.

    `buckets`: bytes, in the order of backward; `ready`: their times as shares of backward; empty: an even
    pace.
    """

    forward_s: float
    backward_s: float
    update_s: float
    buckets: tuple[int, ...]
    cores: float = 2.0
    ready: tuple[float, ...] = ()

    @property
    def alone_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s

    @property
    def parts(self) -> list[float]:
        return [nbytes / sum(self.buckets) for nbytes in self.buckets]

    @property
    def ready_s(self) -> list[float]:
        return [self.backward_s * part for part in self.ready or accumulate(self.parts)]


@dataclass(frozen=True)
class Split:
    step_s: float
    alone_s: float
    encode_s: float
    communicate_s: float
    decode_s: float

    @property
    def hidden_s(self) -> float:
        """Seconds of the exchange that did not lengthen the step."""
        exchange = self.encode_s + self.communicate_s + self.decode_s
        return max(exchange - (self.step_s - self.alone_s), 0.0)

    @property
    def efficiency(self) -> float:
        return self.alone_s / self.step_s


def buckets(nbytes: int) -> tuple[int, ...]:
    """Return DDP's default buckets, a small one first.

    >>> [each >> 20 for each in buckets(60 << 20)]
    [1, 25, 25, 9]
    """
    found = [min(FIRST, nbytes)]
    while (left := nbytes - sum(found)) > 0:
        found.append(min(BUCKET, left))
    return tuple(found)


def time_line(work: Work, rehearsed: Rehearsed, network: Network, size: int) -> Split:
    if size == 1:
        return Split(work.alone_s, work.alone_s, 0.0, 0.0, 0.0)
    crowd = max(1.0, 1.0 / work.cores)
    encode_s = rehearsed.encode_s.at(size) * crowd
    decode_s = rehearsed.decode_s.at(size) * crowd
    if rehearsed.when != "backward":
        coded_s = work.alone_s + encode_s + decode_s
        if rehearsed.when != "next step":
            communicate_s = network.seconds(rehearsed, size)
            step_s = coded_s + communicate_s
        else:
            communicate_s = network.busy.seconds(rehearsed, size)
            step_s = max(coded_s + network.toll_s_a_byte * rehearsed.nbytes(size), communicate_s)
        return Split(step_s, work.alone_s, encode_s, communicate_s, decode_s)
    messages = [
        Message(
            network.seconds(rehearsed, size, part=part),
            network.busy.seconds(rehearsed, size, part=part),
            network.toll_s_a_byte * part * rehearsed.nbytes(size),
        )
        for part in work.parts
    ]
    shared = min(max(2.0 - work.cores, 0.0), 1.0)
    done, communicate_s = _pipelined(work, messages, encode_s + decode_s, shared)
    step_s = work.forward_s + done + work.update_s
    return Split(step_s, work.alone_s, encode_s, communicate_s, decode_s)


class Message(NamedTuple):
    """Seconds of a bucket's messages, alone and beside computing, and computing time."""

    idle_s: float
    busy_s: float
    toll_s: float


def _pipelined(
    work: Work, messages: Sequence[Message], coding_s: float, shared: float
) -> tuple[float, float]:
    late = done = communicate_s = 0.0
    for ready, part, message in zip(work.ready_s, work.parts, messages, strict=True):
        begin = max(ready + late, done)
        if begin < work.backward_s + late:
            late += shared * part * coding_s
        coded = begin + part * coding_s
        left_s = max(work.backward_s + late - coded, 0.0)
        beside = min(left_s / message.busy_s, 1.0) if message.busy_s else 0.0  # overlap with backward
        late += beside * message.toll_s
        passed_s = beside * message.busy_s + (1 - beside) * message.idle_s
        communicate_s += passed_s
        done = coded + passed_s
    return max(done, work.backward_s + late), communicate_s
