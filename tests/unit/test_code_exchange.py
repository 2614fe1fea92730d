"""How LGC's codes travel: what ring and server decode, what the net learns, and that nothing grows."""

from __future__ import annotations

import pytest
import torch
from tests.unit.lgc_world import ROWS, K, both, rows, trained
from tests.unit.lgc_world import one_thread as one_thread
from tests.unit.shared import for_each

from laconic.comm.loopback import Loopback
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.reducers.learned_code import LearnedCode
from laconic.reducers.learned_code.autoencoder import ENCODER, Autoencoder, first_weights, with_decoders
from laconic.reducers.learned_code.code_exchange import (
    AveragedCode,
    LeaderCode,
    Vector,
    common_gain,
    own_gain,
)


def mixing(step: int, size: int, k: int) -> tuple[int, torch.Tensor]:
    return LearnedCode(0.1).bind(ROWS, Loopback.world(size)[0])._mixing(Turn(step), k)


def test_a_ring_decodes_the_average_code() -> None:
    weights = trained("ring")["once/autoencoder/weights"]
    xs, net = [rows(rank, 0)[:K] for rank in range(4)], Autoencoder(weights)

    def play(comm: Loopback) -> tuple[torch.Tensor, torch.Tensor]:
        done = AveragedCode().exchange(comm, weights, Vector(xs[comm.rank], 2.0, 0, torch.ones(K)), 0)
        return done.mean, done.own

    results = Loopback.run(4, play)
    codes = net.encode(torch.stack(xs) / 2)
    base = net.decode(codes.mean(0, keepdim=True), K)[0] * 2
    mean = results[0][0]
    gain = float(mean @ base / (base @ base))
    assert 0.5 < gain < 1.5
    torch.testing.assert_close(mean, gain * base, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sum(own for _, own in results) / 4, mean, rtol=1e-5, atol=1e-5)
    left = [float((x - own).norm() / x.norm()) for x, (_, own) in zip(xs, results, strict=True)]
    assert max(left) < 0.95, "each rank's own part is about its own values"


def test_a_server_decodes_the_leaders_code_and_everyones_innovation() -> None:
    weights = trained("server")["once/autoencoder/weights"]
    xs, net = [rows(rank, 0)[:K] for rank in range(3)], Autoencoder(weights)

    def play(comm: Loopback) -> tuple[torch.Tensor, torch.Tensor]:
        done = LeaderCode(5).exchange(comm, weights, Vector(xs[comm.rank], 2.0, 0, torch.ones(K)), 1)
        return done.mean, done.own

    results = Loopback.run(3, play)
    base = net.decode(net.encode(xs[1][None] / 2), K)[0] * 2
    for x, (_, own) in zip(xs, results, strict=True):
        places, rest = x.abs().topk(5).indices, torch.ones(K)
        rest[places] = 0
        gain = float(x @ (base * rest) / (base * rest).square().sum())
        torch.testing.assert_close(own * rest, max(gain, 0.0) * base * rest, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(own[places], x[places], rtol=1e-6, atol=0)
    mean = sum(own for _, own in results) / 3
    assert all(torch.equal(each, results[0][0]) for each, _ in results)
    torch.testing.assert_close(results[0][0], mean, rtol=1e-5, atol=1e-6)


def test_each_ranks_part_is_decoded_by_its_own_decoder() -> None:
    first = first_weights()
    decoders = [first[ENCODER:] * scale for scale in (1.0, 0.9, 1.2)]
    weights = torch.cat([first[:ENCODER], *decoders])
    xs = [rows(rank, 0)[:K] for rank in range(3)]

    def play(comm: Loopback) -> tuple[torch.Tensor, torch.Tensor]:
        done = LeaderCode(5).exchange(comm, weights, Vector(xs[comm.rank], 2.0, 0, torch.ones(K)), 1)
        return done.mean, done.own

    results = Loopback.run(3, play)
    for x, decoder, (_, own) in zip(xs, decoders, results, strict=True):
        net = Autoencoder(torch.cat([first[:ENCODER], decoder]))
        base, rest = net.decode(Autoencoder(first).encode(xs[1][None] / 2), K)[0] * 2, torch.ones(K)
        rest[x.abs().topk(5).indices] = 0
        gain = float(x @ (base * rest) / (base * rest).square().sum())
        torch.testing.assert_close(own * rest, max(gain, 0.0) * base * rest, rtol=1e-4, atol=1e-5)
    mean = sum(own for _, own in results) / 3
    torch.testing.assert_close(results[0][0], mean, rtol=1e-5, atol=1e-6)


def test_a_decoder_learns_from_its_own_rank_alone() -> None:
    """And with equal decoders the loss is that of one for all."""
    w = torch.stack([rows(rank, 0)[:100] for rank in range(3)])
    weights = with_decoders(first_weights(), 3).requires_grad_()
    loss = LeaderCode(4).loss(Autoencoder(weights), w, 2)
    torch.testing.assert_close(loss, LeaderCode(4).loss(Autoencoder(first_weights()), w, 2))
    (before,) = torch.autograd.grad(loss, weights)
    w[1] *= 1.5
    (after,) = torch.autograd.grad(LeaderCode(4).loss(Autoencoder(weights), w, 2), weights)
    moved = [not torch.equal(a, b) for a, b in zip(decoders_of(before), decoders_of(after), strict=True)]
    assert moved == [False, True, False]


def decoders_of(weights: torch.Tensor) -> torch.Tensor:
    return weights[ENCODER:].view(3, -1)


def test_the_server_loss_is_the_papers_with_averages() -> None:
    net, w = Autoencoder(first_weights()), torch.stack([rows(rank, 0)[:100] for rank in range(3)])
    codes = net.encode(w)
    left = net.decode(codes[2:], 100) - w
    for row, own in zip(left, w, strict=True):
        row[own.abs().topk(4).indices] = 0
    pairs = [(codes[i] - codes[j]).square().mean() for i in range(3) for j in range(3) if i != j]
    plain = 0.5 * left.square().mean() + 0.5 * sum(pairs) / len(pairs)
    torch.testing.assert_close(LeaderCode(4).loss(net, w, 2) / 100, plain)


@for_each("seed", range(20))
def test_a_gain_is_the_best_that_lets_nothing_grow(seed: int) -> None:
    """Against a search over a grid of gains."""
    generator = torch.Generator().manual_seed(seed)
    w, noise = torch.randn(2, 3, 8, dtype=torch.float64, generator=generator)
    p = w * 0.4 * (seed % 5) + noise
    fits = [(float(a @ b), float(b @ b)) for a, b in zip(w, p, strict=True)]
    gains = torch.linspace(0, 5, 5001, dtype=torch.float64)
    left = (w - gains.view(-1, 1, 1) * p).square().sum(2)
    allowed = (left <= w.square().sum(1) + 1e-9).all(1)
    best = float(gains[left.sum(1).where(allowed, torch.inf).argmin()])
    assert common_gain(fits) == pytest.approx(best, abs=1.1e-3)
    assert own_gain(fits[0]) == pytest.approx(float(gains[left[:, 0].argmin()]), abs=1.1e-3)


@both
def test_the_net_learns_what_is_there(instance: str) -> None:
    """On gradients that it has not seen, the code keeps over a fifth of the energy, of a quarter of the
    numbers and after 60 steps only; that of an untrained net keeps next to nothing."""

    def play(comm: Loopback, weights: torch.Tensor) -> list[float]:
        kept, exchange = [], AveragedCode() if instance == "ring" else LeaderCode(12)
        for step in range(500, 506):
            x = rows(comm.rank, step)
            x = x[rows(step % 2, step).abs().topk(K).indices.sort().values]
            vector = Vector(x, float(x.square().mean().sqrt()), 0, torch.ones(K))
            left = x - exchange.exchange(comm, weights, vector, step % 2).own
            kept.append(1 - float(left.square().sum() / x.square().sum()))
        return kept

    weights = trained(instance)["once/autoencoder/weights"]
    after = [sum(each) / 6 for each in Loopback.run(2, lambda comm: play(comm, weights))]
    before = [sum(each) / 6 for each in Loopback.run(2, lambda comm: play(comm, first_weights()))]
    innovation = 0.0 if instance == "ring" else 0.18  # needs no net
    assert max(before) < innovation + 0.05
    assert min(after) > innovation + 0.2


def residuals(spec: str, steps: int, state: dict[str, torch.Tensor]) -> list[float]:
    """The mean norm over ranks of what error feedback holds, every 50 steps, for gradients that go on."""
    reducer = parse(spec)

    def play(comm: Loopback) -> list[float]:
        bound, x, out, norms = reducer.bind(ROWS, comm), torch.zeros(2400), torch.empty(2400), []
        if state:
            bound.load_state_dict(state)
        for step in range(steps):
            x += rows(comm.rank, step % 25)
            bound.reduce(x, ROWS, Turn(step, comm.rank), out).subtract_from_(x)
            if step % 50 == 49:
                norms.append(float(x.norm()))
        return norms

    return [sum(each) / 2 for each in zip(*Loopback.run(2, play), strict=True)]


@both
def test_what_stays_behind_is_bounded(instance: str) -> None:
    """The same 25 gradients over and over: after a while the residual no longer grows. Alone, the sum of them
    would, by over 1,000 in 50 steps."""
    spec = f"learned_code(0.2, until=0, instance='{instance}', innovation=0.02)"
    norms = residuals(spec, 250, trained(instance))
    sums = torch.stack([sum(rows(rank, step) for step in range(25)) * 2 for rank in range(2)])
    assert float(sums.norm(dim=1).min()) > 400
    assert max(norms[4:]) < 1.25 * norms[3], norms
    assert max(norms) < 10 * max(residuals("cltk(0.2)", 100, {})), norms


def test_values_are_turned_round_and_in_every_second_round_flipped() -> None:
    rounds = [mixing(step, size=3, k=64) for step in range(12)]
    plain = [bool((signs == 1).all()) for _, signs in rounds]
    assert plain == [True] * 3 + [False] * 3 + [True] * 3 + [False] * 3
    assert not torch.equal(rounds[3][1], rounds[4][1])
    assert all(10 < int((signs < 0).sum()) < 54 for _, signs in rounds[3:6])
    assert len({shift for shift, _ in rounds}) > 8
    for shift, signs in rounds:
        vector = Vector(rows(0, 0)[:64], 2.0, shift, signs)
        assert torch.equal(vector.normal[shift], vector.values[0] / 2 * signs[shift])
        assert torch.equal(vector.restored(vector.normal), vector.values)
