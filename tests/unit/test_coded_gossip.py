"""CHOCO-SGD and DeepSqueeze against their equations, and the gammas that converge."""

from __future__ import annotations

import re

import torch
from tests.unit.gossip_world import bound, gradient, start, trajectory
from tests.unit.shared import for_each, refuses

from laconic.comm.loopback import Loopback
from laconic.core.errors import SpecError
from laconic.core.layout import Segments
from laconic.core.spec import parse
from laconic.exchange.method import lift, lift_codec
from laconic.strategies.gossip.choco import CHOCO
from laconic.strategies.gossip.deepsqueeze import DeepSqueeze
from laconic.strategies.gossip.mixing import matrix, uniform

SHAPE = (20, 25)  # 500 elements, as in the spec's known answers
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # float32 over a few steps of numbers near 1


def coded(codec, x):
    """What decoders have of each row."""
    rows = Segments.consecutive([x.shape[1]] * len(x))
    wire = codec.encode_segments(x.flatten(), rows, range(len(x)))
    return codec.decode_segments_add_(wire, rows, torch.zeros(x.numel())).view_as(x)


def spread(spec, steps):
    """Mean square distance of ranks from their mean, after consensus alone; and how far that has moved."""
    seen = trajectory(spec, 8, steps, lr=0.0, shape=SHAPE)[-1].double()
    mean = start(8, SHAPE).double().mean(0)
    return float((seen - seen.mean(0)).square().mean()), float((seen.mean(0) - mean).abs().max())


class Twin:
    """CHOCO's equation on all ranks at once, float32 (size, n)."""

    def __init__(self, message, gamma, size):
        self.codec, self.gamma = lift_codec(message), gamma
        self.mixed = matrix(uniform, parse("ring()"), size, 0).float()
        self.x = start(size, SHAPE)
        self.copies, self.around = torch.zeros_like(self.x), torch.zeros_like(self.x)

    def step(self, moved):
        self.x = self.x + moved + self.gamma * (self.around - self.copies)
        sent = coded(self.codec, self.x - self.copies)
        self.copies, self.around = self.copies + sent, self.around + self.mixed @ sent

    def spread_after(self, steps):
        """Mean square distance of the ranks from their mean, after consensus alone."""
        for _ in range(steps):
            self.step(0.0)
        return float((self.x - self.x.mean(0)).square().mean())


@for_each("message", ["dense()", "topk(density=0.1)"])
def test_choco_is_its_equation(message):
    twin = Twin(message, 0.4, size=5)
    seen = trajectory(f"choco({message}, gamma=0.4)", 5, 6, shape=SHAPE)
    for step in range(6):
        grads = torch.stack([gradient(rank, step, SHAPE).flatten() for rank in range(5)])
        twin.step(-0.1 * grads)
        torch.testing.assert_close(seen[step], twin.x, **TOLERANCE)


@for_each(
    "message, gamma, steps, converges",
    [
        ("dense()", 1.0, 20, True),
        ("topk(density=0.1)", 0.3, 60, True),
        ("topk(density=0.1)", 1.0, 100, False),
        ("topk(density=0.01)", 0.3, 420, False),
        ("topk(density=0.01)", 0.04, 320, True),
    ],
)
def test_which_gamma_converges_depends_on_the_codec(message, gamma, steps, converges):
    """Known answers for a ring of 8 and 500 elements: spread falls below 1 %, or grows tenfold."""
    grown = Twin(message, gamma, 8).spread_after(steps) / Twin(message, gamma, 8).spread_after(0)
    assert grown < 0.01 if converges else grown > 10


@for_each("message", ["minmax(bits=4, block=50)", "topk(density=0.1)"])
def test_deepsqueeze_is_its_equation(message):
    codec, mixed = lift_codec(message), matrix(uniform, parse("ring()"), 5, 0).float()
    x = start(5, SHAPE)
    error = torch.zeros_like(x)
    seen = trajectory(f"deepsqueeze({message}, gamma=0.2)", 5, 6, shape=SHAPE)
    for step in range(6):
        x = x - 0.1 * torch.stack([gradient(rank, step, SHAPE).flatten() for rank in range(5)])
        error = error + x
        sent = coded(codec, error)
        error = error - sent
        x = x + 0.2 * (mixed @ sent - sent)
        torch.testing.assert_close(seen[step], x, **TOLERANCE)


def test_gossip_lifts_what_compress_lifts():
    """To the same codec, from a string as from an object."""
    for compressor in ("topk(density=0.1)", "sign()"):
        (sent, _) = lift(compressor).routes
        for given in (compressor, parse(compressor)):
            assert CHOCO(given).codec == DeepSqueeze(given).codec == sent.reducer.codec


@for_each(
    "spec",
    [
        "choco()",
        "choco(sign(), gamma=0.2)",
        "choco(qsgd(levels=7, block=64), gamma=0.2)",
        "deepsqueeze()",
        "deepsqueeze(topk(density=0.1), gamma=0.02)",
    ],
)
def test_the_mean_is_kept_and_ranks_come_together(spec):
    begin = float((start(8, SHAPE) - start(8, SHAPE).mean(0)).square().mean())
    apart, moved = spread(spec, 40)
    assert apart < begin
    assert moved < 1e-4


def sent_in(spec, steps=3):
    def play(comm):
        at_work, take, _ = bound(spec, comm, shape=SHAPE)
        for step in range(steps):
            take(step)
        return at_work.comm.snapshot().payload_sent

    return Loopback.run(4, play)


def test_what_travels_is_the_codecs_message_to_each_neighbour():
    assert sent_in("choco(topk(density=0.1), topology=complete())")[0] < 3 * 3 * (4 * 50 + 60)
    assert sent_in("deepsqueeze(minmax(bits=8, block=500))") == [3 * 2 * (500 + 8)] * 4


@for_each(
    "spec, words",
    [
        ("choco(topology=exponential())", "change or do not answer"),
        ("deepsqueeze(topology=random_matching())", "change or do not answer"),
        ("choco(gamma=0)", "gamma must be"),
        ("deepsqueeze(minmax(bits=1))", "omega must be below 1"),
        ("choco(ring())", "compressor= takes a codec or selector, such as topk(density=0.1), got ring()"),
        ("choco(gather(sign()))", "got the reducer gather(sign()); that averages over all ranks: name the"),
        ("lpdt(dgc(density=0.1))", "got the method dgc(density=0.1); that averages over all ranks"),
        ("choco(topology=topk(density=0.1))", "topology must be a topology"),
    ],
)
def test_what_cannot_be_is_refused(spec, words):
    refuses(SpecError, re.escape(words), lambda: bound(spec, Loopback.world(4)[0], shape=SHAPE))
