"""Seconds of an exchange: on a GPU by events, which are read once the GPU has passed them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import torch
from tests.unit.shared import for_each

import laconic
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.layout import Layout
from laconic.exchange.attached import Attached
from laconic.exchange.method import lift
from laconic.exchange.no_optimiser import MOMENTUM_SGD
from laconic.exchange.stats import Stats
from laconic.exchange.stopwatch import Seconds, weight_of


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
    sampled = Seconds()
    sampled.add_events(Event(0.0), [(Event(1000.0), Event(3000.0))], Event(6000.0), 8)
    assert sampled.so_far() == {"encode_s": 8.0, "communicate_s": 16.0, "decode_s": 24.0}
    assert sum(weight_of(step) for step in range(64)) == 64


def test_collectives_are_between_two_events():
    comm = Metered(Loopback.world(1)[0])
    comm.mark(SimpleNamespace(now=map(Event, count(0.0)).__next__))  # an event a millisecond
    comm.all_reduce(torch.ones(2))
    comm.all_gather(torch.ones(2))
    assert comm.events_since_mark() == [(Event(0.0), Event(1.0)), (Event(2.0), Event(3.0))]
    comm.mark()
    comm.all_reduce(torch.ones(2))
    assert comm.events_since_mark() == []


NAMED = re.compile(r'\.phase\(f?"([a-z ]+)')


def test_every_named_phase_is_explained() -> None:
    files = Path(laconic.__file__).parent.rglob("*.py")
    names = {name.strip() for path in files for name in NAMED.findall(path.read_text())}
    assert {"gossip", "leader", "sparse gradients", "parameters"} <= names
    unexplained = {name for name in names if f'"{name}' not in (Stats.__doc__ or "")}
    assert not unexplained


@for_each(
    "spec, phase", [("fp16()", "sum(dtype='fp16') all_reduce"), ("qsgd()", "gather(qsgd()) all_gather")]
)
def test_what_a_method_sends_is_under_its_name(spec: str, phase: str) -> None:
    """What it agrees on before, such as fp16's scale, too."""
    layout = Layout.of([("weight", (4, 50))])

    def body(comm: Loopback) -> set[str]:
        metered = Metered(comm)
        exchange = Attached(lift(spec), layout, metered, MOMENTUM_SGD)
        exchange.begin()
        exchange.mean_(torch.randn(200), layout)
        exchange.end()
        return {" ".join(key) for key in metered.snapshot().parts}

    assert Loopback.run(2, body) == [{phase}] * 2
