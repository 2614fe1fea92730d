"""An exchange of several routes: sums go on while others reduce, and end whatever becomes of the step."""

from __future__ import annotations

import torch
from tests.unit.shared import for_each

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.layout import Layout
from laconic.exchange.attached import Attached
from laconic.exchange.method import lift
from laconic.exchange.no_optimiser import MOMENTUM_SGD

LAYOUT = Layout.of([("weight", (4, 50)), ("bias", (50,))])


class Telling(Loopback):
    """Notes what is called."""

    def __init__(self, room, rank):
        super().__init__(room, rank)
        self.calls = []

    def begin_all_reduce(self, x):
        self.calls.append("begin")
        end = super().begin_all_reduce(x)
        return lambda: self.calls.append("end") or end()

    def all_gather(self, x):
        self.calls.append("gather")
        return super().all_gather(x)


def exchanged(spec, broken=()):
    """Each rank's calls, bucket and reason to skip. Rank 1 has NaN in the `broken` entries."""

    def body(comm):
        telling = Telling(comm.room, comm.rank)
        exchange = Attached(lift(spec), LAYOUT, Metered(telling), MOMENTUM_SGD)
        bucket = torch.full((LAYOUT.numel,), 1.0 + comm.rank)
        if comm.rank == 1:
            bucket[list(broken)] = torch.nan
        exchange.begin()
        exchange.mean_(bucket, LAYOUT)
        return telling.calls, bucket, exchange.skip_reason

    return Loopback.run(2, body)


def test_vectors_are_on_their_way_while_matrices_are_encoded_and_gathered():
    for calls, bucket, void in exchanged("topk(density=0.5)"):
        assert calls == ["begin", "gather", "end"]
        assert void is None
        assert torch.equal(bucket[-50:], torch.full((50,), 1.5))


@for_each("entry, whys", [(0, ("a tensor on another rank", "weight")), (-1, ("bias", "bias"))])
def test_a_sum_under_way_ends_where_the_step_is_void(entry, whys):
    found = exchanged("topk(density=0.5)", [entry])
    assert tuple(void for _, _, void in found) == whys
    for calls, bucket, _ in found:
        assert calls == ["begin", "gather", "end"]
        assert bool(bucket.isnan().all())
