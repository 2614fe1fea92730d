"""Bytes of a step between stages or blocks: what one side sends on the network, the other receives."""

from __future__ import annotations

from dataclasses import replace

from laconic.admm import Stats
from laconic.admm.stats import Messages as BlockMessages
from laconic.comm.wire_model import PacketModel
from laconic.tools.tasks.blockwise import step_costs
from laconic.tools.tasks.measured_stage import Messages

COUNTS = (3, 60_000, 2, 500)  # sent, their bytes, received, their bytes
MIRRORED = (2, 500, 3, 60_000)


def test_a_stage_receives_what_its_neighbour_sends():
    here, there = Messages(*COUNTS), Messages(*MIRRORED)
    assert (here.network_sent, here.network_received) == (there.network_received, there.network_sent)
    link = PacketModel()
    assert here.network_sent == 3 * link.forth(20_000) + 2 * link.back(250)


def test_a_block_receives_what_its_neighbours_send():
    none = BlockMessages()
    before = Stats(
        **{name: 0 for name in Stats.__dataclass_fields__} | {"activations": none, "targets": none}
    )
    here = step_costs(before, replace(before, activations=BlockMessages(*COUNTS)))
    there = step_costs(before, replace(before, activations=BlockMessages(*MIRRORED)))
    assert here["network_sent"] == there["network_received"] > here["payload_sent"]
    assert here["network_received"] == there["network_sent"] > here["payload_received"]
