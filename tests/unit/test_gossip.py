"""SGP, Overlap SGP and D-PSGD against their equations, on ranks that are threads."""

from __future__ import annotations

import re

import pytest
import torch
from tests.unit.gossip_world import N, bound, gradient, start, trajectory
from tests.unit.shared import for_each, refuses

from laconic.comm.loopback import Loopback
from laconic.core.errors import AttachError, SpecError
from laconic.core.spec import parse
from laconic.strategies.gossip.mixing import matrix, metropolis, uniform
from laconic.strategies.gossip.mixing.messages import ParameterMessage

UNEVEN = "graph(edges=((0, 1), (1, 2), (2, 0), (0, 2), (2, 3), (3, 0)), directed=True)"
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}  # float32 over a few steps of numbers near 1


@for_each("size", [2, 4, 8])
def test_one_peer_a_step_averages_exactly_in_log_n_steps(size):
    seen = trajectory("sgp()", size, steps=3, lr=0.0)
    mean = start(size).mean(0)
    torch.testing.assert_close(seen[size.bit_length() - 2], mean.expand(size, N), **TOLERANCE)


@for_each("spec, mixing, size", [("sgp(topology={})", uniform, 4), ("dpsgd(topology={})", metropolis, 5)])
@for_each("wire", ["fp32", "fp16"])
def test_a_step_is_the_update_and_then_the_matrix(spec, mixing, size, wire):
    """Brute force: x <- W (x - lr g), w <- W w, z = x / w, in float64, on graphs that are not regular."""
    topology = UNEVEN if mixing is uniform else "linear()"
    seen = trajectory(spec.format(topology)[:-1] + f", wire='{wire}')", size, steps=6)
    x, w = start(size).double(), torch.ones(size, 1, dtype=torch.float64)
    for step in range(6):
        grads = torch.stack([gradient(rank, step) for rank in range(size)])
        mixed = matrix(mixing, parse(topology), size, step)
        x, w = mixed @ (x - 0.1 * grads.double()), mixed @ w
        loose = {"rtol": 1e-2, "atol": 5e-3} if wire == "fp16" else TOLERANCE  # 11 bits of mantissa
        torch.testing.assert_close(seen[step].double(), x / w, **loose)


@for_each("topology", ["ring()", "complete()", "bipartite_exponential()"])
def test_on_a_regular_graph_sgp_is_dpsgd_bit_for_bit(topology):
    one = trajectory(f"sgp(topology={topology})", 6, steps=8)
    other = trajectory(f"dpsgd(topology={topology})", 6, steps=8)
    assert torch.equal(one, other)


def mean_after(spec, size, steps, lr=0.0):
    def play(comm):
        at_work, take, aside = bound(spec, comm, lr)
        for step in range(steps):
            take(step)
        at_work.drain(aside)
        found = at_work.consensus(aside)
        at_work.close()
        return found, float(getattr(at_work, "weight", 1.0))

    found, weights = zip(*Loopback.run(size, play), strict=True)
    assert all(torch.equal(found[0], other) for other in found)
    return found[0], sum(weights)


@for_each(
    "spec",
    [
        f"sgp(topology={UNEVEN})",
        f"sgp(topology={UNEVEN}, wire='fp16')",
        "sgp(wire='bf16')",
        "dpsgd(topology=linear(), wire='bf16')",
        f"osgp(topology={UNEVEN}, staleness=3)",
        "osgp(staleness=2, wire='fp16')",
    ],
)
def test_gossip_keeps_the_mean_and_the_weights(spec):
    """What rounding to the wire leaves stays with the sender, so the mean is kept in float32."""
    mean, weights = mean_after(spec, size=4, steps=9)
    torch.testing.assert_close(mean, start(4).mean(0), **TOLERANCE)
    assert weights == pytest.approx(4, abs=1e-12)


@for_each("staleness", [1, 3])
def test_no_mass_is_lost_at_any_moment_of_overlap(staleness):
    """Sum of the weights here, and of those sent and not yet taken, is the number of ranks."""
    size = 4

    def play(comm):
        at_work, take, aside = bound(f"osgp(staleness={staleness})", comm)
        sums = []
        for step in range(12):
            take(step)
            at_work.pending.arrival.wait()  # what is in the buffers now is what was sent to this rank
            shares = at_work.pending.shares
            came = at_work.buffers.coming(shares)
            under_way = sum(came[rank].weight * share for rank, share in shares.into.items())
            mine = torch.tensor([float(at_work.weight) + under_way], dtype=torch.float64)
            sums.append(float(aside.all_reduce(mine)))
        at_work.close()
        return sums, float(at_work.weight)

    for sums, weight in Loopback.run(size, play):
        assert sums == pytest.approx([size] * 12, abs=1e-12)
        assert weight != 1.0


@for_each("staleness", [1, 3])
def test_overlap_takes_a_round_so_many_steps_later(staleness):
    """Brute force in float64."""
    size, steps, topology = 4, 8, parse("exponential()")
    seen = trajectory(f"osgp(staleness={staleness})", size, steps)
    x, w = start(size).double(), torch.ones(size, 1, dtype=torch.float64)
    late_x, late_w = torch.zeros_like(x), torch.zeros_like(w)
    for step in range(steps):
        x = x - 0.1 * torch.stack([gradient(rank, step) for rank in range(size)]).double()
        if step % staleness == 0:
            x, w = x + late_x, w + late_w
            mixed = matrix(uniform, topology, size, step // staleness)
            kept = mixed.diagonal().view(-1, 1)
            sent = mixed - torch.diag(mixed.diagonal())
            late_x, late_w = sent @ x, sent @ w
            x, w = kept * x, kept * w
        torch.testing.assert_close(seen[step].double(), x / w, **TOLERANCE)


def test_what_travels_is_counted():
    def play(spec):
        def one(comm):
            at_work, take, aside = bound(spec, comm)
            for step in range(3):
                take(step)
            at_work.drain(aside)
            at_work.close()
            return at_work.comm.snapshot().payload_sent, at_work.notes()

        return Loopback.run(4, one)

    for sent, notes in play("sgp()"):
        assert sent == 3 * 4 * N
        assert notes["weight"] == 1.0
        assert len(notes["peers"]) == 1
    assert [sent for sent, _ in play("sgp(wire='fp16')")] == [3 * (2 * N + 8)] * 4
    assert [sent for sent, _ in play("sgp(topology=ring())")] == [3 * 2 * 4 * N] * 4
    assert [sent for sent, _ in play("osgp()")] == [3 * (4 * N + 8)] * 4


@for_each(
    "spec, size, words",
    [
        ("sgp()", 1, "the number of ranks"),
        ("sgp(topology=bipartite_exponential())", 5, "5"),
        ("osgp(topology=graph(edges=((0, 1),), directed=True))", 2, "does not connect 2 ranks"),
        ("sgp(wire='int8')", 2, "wire must be"),
        ("osgp(staleness=0)", 2, "sgp() does not overlap"),
        ("dpsgd(topology=exponential())", 4, "both ways"),
        ("sgp(topology=topk(density=0.1))", 4, "topology must be a topology"),
    ],
)
def test_what_cannot_gossip_is_refused(spec, size, words):
    refuses(SpecError, re.escape(words), lambda: bound(spec, Loopback.world(size)[0]))


class Scaled(torch.optim.Optimizer):
    """Its step depends on the size of the parameters, as that of LARS and LAMB."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})


def test_an_optimiser_that_is_not_known_to_be_additive_needs_a_regular_graph():
    optimizer = Scaled([torch.nn.Parameter(torch.ones(3))])
    parse("sgp()").check(4, optimizer)
    for spec in ("osgp()", f"sgp(topology={UNEVEN})"):
        with pytest.raises(AttachError, match="Scaled"):
            parse(spec).check(4, optimizer)
    with pytest.raises(AttachError, match="LBFGS"):
        parse("sgp()").check(4, torch.optim.LBFGS([torch.nn.Parameter(torch.ones(3))]))


@for_each(
    "spec", ["sgp(topology=random_matching())", "sgp(topology=random_matching(), wire='bf16')", "osgp()"]
)
def test_receive_buffers_do_not_grow_with_the_peers_met(spec):
    """One model is received a step, whoever sends it: so one buffer, and one for what is sent."""

    def play(comm):
        at_work, step, _ = bound(spec, comm)
        for number in range(12):
            step(number)
        at_work.drain(comm)
        at_work.close()
        buffers = getattr(at_work, "buffers", None) or at_work._buffers
        return buffers.count + len(getattr(at_work, "_landing", ()))

    assert all(count <= 2 for count in Loopback.run(8, play))


@for_each("wire", ["fp16", "bf16"])
def test_what_a_wire_of_16_bits_cannot_hold_saturates(wire):
    """The sender keeps the rest: ranks that agree go on agreeing, and an infinite weight stays one."""
    x = torch.tensor([1.0, 7e4, -torch.finfo(torch.float32).max, torch.inf])
    message = ParameterMessage(x, wire)
    message.write(x, 0.5)
    most = torch.finfo(message.x.dtype).max
    assert message.x.tolist() == [1.0, *x[1:3].clamp(-most, most).to(message.x.dtype).tolist(), torch.inf]
    assert message.x[:3].isfinite().all()


@for_each("spec", ["sgp(wire='fp16')", "osgp(wire='fp16')"])
def test_weights_too_large_for_the_wire_stay(spec):
    def play(comm):
        at_work, take, aside = bound(spec, comm, lr=0.0)
        at_work.replica.flat.fill_(7e4)
        for step in range(4):
            take(step)
        return at_work.consensus(aside)

    for x in Loopback.run(2, play):
        torch.testing.assert_close(x, torch.full_like(x, 7e4))
