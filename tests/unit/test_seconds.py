"""Seconds of an exchange: on a GPU by events, which are read once the GPU has passed them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.exchange.stats import Seconds
from laconic.exchange.stopwatch import weight_of


@dataclass
class Event:
    """Stands for torch.cuda.Event: passed `at` these milliseconds, once `over`."""

    at: float
    over: bool = True

    def query(self) -> bool:
        return self.over

    def elapsed_time(self, end_event: Event) -> float:
        return end_event.at - self.at


def test_an_exchange_on_a_gpu_is_counted_when_it_is_over():
    seconds, end = Seconds(), Event(10_000.0, over=False)
    collectives = [(Event(3000.0), Event(5000.0)), (Event(6000.0), Event(7000.0))]
    seconds.add_events(Event(1000.0), collectives, end)
    assert seconds.so_far() == {"encode_s": 0.0, "communicate_s": 0.0, "decode_s": 0.0}
    end.over = True
    assert seconds.so_far() == {"encode_s": 2.0, "communicate_s": 3.0, "decode_s": 4.0}
    seconds.add_events(Event(0.0), [], Event(500.0))  # without a collective
    assert seconds.plus(Seconds()).encode_s == 2.5


class Moments:
    """Stands for `Instants`: an event a millisecond."""

    def __init__(self) -> None:
        self._number = 0

    def now(self) -> Event:
        self._number += 1
        return Event(float(self._number - 1))


def test_a_sampled_exchange_counts_for_all():
    seconds = Seconds()
    seconds.add_events(Event(0.0), [(Event(1000.0), Event(3000.0))], Event(6000.0), 8)
    assert seconds.so_far() == {"encode_s": 8.0, "communicate_s": 16.0, "decode_s": 24.0}
    assert sum(weight_of(step) for step in range(64)) == 64


def test_collectives_are_between_two_events():
    comm = Metered(Loopback.world(1)[0])
    comm.mark(Moments())
    comm.all_reduce(torch.ones(2))
    comm.all_gather(torch.ones(2))
    assert comm.events_since_mark() == [(Event(0.0), Event(1.0)), (Event(2.0), Event(3.0))]
    comm.mark()
    comm.all_reduce(torch.ones(2))
    assert comm.events_since_mark() == []
