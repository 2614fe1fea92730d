"""What Metered counts, against counts by hand."""

from __future__ import annotations

import threading

import torch
from tests.unit.shared import for_each

from laconic.comm import wire_model as link
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.comm.wire_model import Messages, PacketModel

SIZE = 4


class Clock:
    """A clock that moves one second each time it is read."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        self.now += 1.0
        return self.now


def one_of_each(comm):
    comm = Metered(comm, Clock())
    rank, size = comm.rank, comm.size
    comm.all_reduce(torch.ones(100))
    comm.all_gather(torch.ones(rank * 10, dtype=torch.uint8))
    comm.reduce_scatter([torch.ones(5)] * size)
    comm.all_to_all([torch.ones(10 * to, dtype=torch.uint8) for to in range(size)])
    comm.broadcast(torch.ones(7), root=1)
    comm.exchange({(rank + 1) % size: torch.ones(3)}, {(rank - 1) % size: torch.ones(3)})
    return comm.snapshot()


def test_payload_is_what_the_caller_handed_over_once():
    for rank, meter in enumerate(Loopback.run(SIZE, one_of_each)):
        sent = {name: tally.payload_sent for (_, name), tally in meter.parts.items()}
        received = {name: tally.payload_received for (_, name), tally in meter.parts.items()}
        assert sent == {
            "all_reduce": 400,
            "all_gather": 10 * rank,
            "reduce_scatter": 60,
            "all_to_all": sum(10 * r for r in range(SIZE) if r != rank),
            "broadcast": 28 if rank == 1 else 0,
            "exchange": 12,
        }
        assert received == {
            "all_reduce": 400,
            "all_gather": sum(10 * r for r in range(SIZE) if r != rank),
            "reduce_scatter": 20,
            "all_to_all": 30 * rank,
            "broadcast": 0 if rank == 1 else 28,
            "exchange": 12,
        }
        assert meter.calls == 6 and meter.seconds == 6.0
        assert meter.payload_sent == sum(sent.values())


def test_what_all_send_on_the_wire_is_what_all_receive():
    meters = Loopback.run(SIZE, one_of_each)
    for key in meters[0].parts:
        sent = sum(meter.parts[key].network_sent for meter in meters)
        assert sent == sum(meter.parts[key].network_received for meter in meters) > 0


@for_each("size", [2, 3, 4, 8])
@for_each("nbytes", [1, 8, 30_000, 4_000_000, 97_000_001])
def test_a_ring_passes_on_all_but_its_own_twice(size, nbytes):
    messages = link.all_reduce(nbytes, size)
    exact = 2 * (size - 1) / size * nbytes
    assert exact <= sum(messages.sent) <= exact + 4 * size * (nbytes // link.SEGMENT + 1)
    assert max(messages.sent) <= link.SEGMENT


@for_each("size", range(1, 10))
def test_a_tree_reaches_every_place_once(size):
    trees = [link.broadcast(10, size, place) for place in range(size)]
    assert sum(len(tree.sent) for tree in trees) == size - 1
    assert [len(tree.received) for tree in trees] == [0] + [1] * (size - 1)


def test_a_message_by_hand():
    # 2000 + 48 bytes are two packets; with the announcement three, of which every second is acknowledged.
    assert PacketModel().forth(2000) == 2000 + 48 + 2 * 66 + (48 + 66)
    assert PacketModel().back(2000) == (48 + 66) + 1 * 66
    assert PacketModel(mtu=9000).packets(2000) == 1
    both = Messages((2000,), (2000,))
    assert (
        PacketModel().sent(both)
        == PacketModel().received(both)
        == PacketModel().forth(2000) + PacketModel().back(2000)
    )


def test_alone_nothing_goes_on_the_wire():
    (meter,) = Loopback.run(1, lambda comm: one_of_each_alone(Metered(comm)))
    assert meter.network_sent == meter.network_received == 0
    assert meter.payload_sent == 40 + 10


def one_of_each_alone(comm):
    comm.all_reduce(torch.ones(10))
    comm.all_gather(torch.ones(10, dtype=torch.uint8))
    return comm.snapshot()


def test_phases_marks_and_reset():
    comm = Metered(Loopback.world(1)[0], Clock())
    comm.mark()
    assert comm.since_mark() == (None, 0.0)
    with comm.phase("warm-up"):
        comm.all_reduce(torch.ones(1))
    comm.all_reduce(torch.ones(2))
    assert comm.since_mark() == (101.0, 2.0)
    parts = comm.snapshot().parts
    assert parts["warm-up", "all_reduce"].payload_sent == 4 and parts["", "all_reduce"].payload_sent == 8
    comm.reset()
    assert comm.snapshot().calls == 0


def test_groups_split_off_are_counted_too():
    def body(comm):
        comm = Metered(comm)
        half = comm.split(comm.rank % 2)
        with comm.phase("inner"):
            half.all_reduce(torch.ones(10))
        return comm.snapshot()

    for meter in Loopback.run(4, body):
        assert list(meter.parts) == [("inner", "all_reduce")]
        assert meter.network_sent == PacketModel().sent(link.all_reduce(40, 2))


def test_any_thread_may_ask():
    comm = Metered(Loopback.world(1)[0])
    wrong, done = [], threading.Event()

    def ask():
        while not done.is_set():
            meter = comm.snapshot()
            if meter.payload_sent != 4 * meter.calls:
                wrong.append(meter)

    asking = threading.Thread(target=ask)
    asking.start()
    for _ in range(2000):
        comm.all_reduce(torch.ones(1))
    done.set()
    asking.join()
    assert not wrong and comm.snapshot().calls == 2000
