"""A finite gradient that overflows in a memory: the rank at fault names the tensor."""

from __future__ import annotations

import torch
from tests.unit.shared import for_each

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.layout import Layout
from laconic.exchange.attached import Attached
from laconic.exchange.method import lift
from laconic.exchange.no_optimiser import MOMENTUM_SGD

LAYOUT = Layout.of([("first", (4, 50)), ("second", (4, 50)), ("bias", (50,))])
SIGNS = {"ef21_sgdm(topk(density=0.9), eta=1.0)": (-1.0, 1.0)}  # of two steps: by default equal


@for_each("waits", [False, True])
@for_each(
    "spec",
    ["topk(density=0.01)", "dgc(density=0.01)", "signum()", "ef21_sgdm(topk(density=0.9), eta=1.0)"],
)
def test_the_rank_at_fault_names_the_tensor_that_overflows(spec, waits):
    """Rank 1 has two gradients near float32's largest; the other rank has small ones."""
    before, after = SIGNS.get(spec, (1.0, 1.0))

    def body(comm):
        exchange = Attached(lift(spec), LAYOUT, Metered(comm), MOMENTUM_SGD)
        for sign in (before, after):
            bucket = torch.ones(LAYOUT.numel, dtype=torch.float32)
            if comm.rank == 1:
                entry = LAYOUT["second"]
                bucket[entry.offset : entry.offset + entry.numel] = 3e38 * sign
            exchange.begin()
            exchange.mean_(bucket, LAYOUT, wait=waits)
            exchange.end()
        return exchange.skip_reason

    assert Loopback.run(2, body) == ["a tensor on another rank", "second"]
