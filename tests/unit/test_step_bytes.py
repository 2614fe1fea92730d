"""Bytes of a step between stages or blocks: what one side sends on the network, the other receives."""

from __future__ import annotations

from dataclasses import replace

from laconic.admm import Stats
from laconic.comm.message_counts import NONE, MessageCounts
from laconic.comm.wire_model import PacketModel
from laconic.tools.tasks.blockwise import step_costs

HERE = MessageCounts(sent=3, sent_bytes=60_000, received=2, received_bytes=500)
THERE = MessageCounts(sent=2, sent_bytes=500, received=3, received_bytes=60_000)


def test_a_rank_receives_what_its_neighbour_sends():
    assert (HERE.network_sent, HERE.network_received) == (THERE.network_received, THERE.network_sent)
    link = PacketModel()
    assert HERE.network_sent == 3 * link.forth(20_000) + 2 * link.back(250)


def test_events_of_a_block_have_headers_in_both_directions():
    zeros = dict.fromkeys(Stats.__dataclass_fields__, 0)
    before = Stats(**zeros | {"activations": NONE, "targets": NONE})
    here, there = (step_costs(before, replace(before, activations=each)) for each in (HERE, THERE))
    assert here["network_sent"] == there["network_received"] > here["payload_sent"]
    assert here["network_received"] == there["network_sent"] > here["payload_received"]
