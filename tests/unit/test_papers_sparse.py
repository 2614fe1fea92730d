"""STC, DHQC, FastSGD and SketchML: what each paper says beyond the laws, and what they weigh."""

from __future__ import annotations

import math

import torch
from tests.unit.shared import for_each, refuses, same
from torch import Tensor

from laconic.codecs.logquant import Logquant
from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.exchange.method import lift

from ..laws.worlds import MODEL, cut, everywhere, exchange_on, gradient, one_step

STC = ("stc(density=0.05)", "stc(density=0.05, down=0.1, indices=fine_delta())")
PAPERS = [*STC, "dhqc(density=0.05)", "sketchml(density=0.05)"]
STEPS = 5


def means_of(exchange, rank: int) -> list[Tensor]:  # type: ignore[no-untyped-def]
    return [one_step(exchange, gradient(rank, t), [MODEL])[0] for t in range(STEPS)]


def play(spec: str, size: int = 3) -> list[list[Tensor]]:
    """Means of some steps, rank by rank."""

    return everywhere(size, lambda comm: means_of(exchange_on(comm, spec), comm.rank))


def of(spec: str, tensor: int = 0) -> Codec:
    """The codec of a method's first route."""
    codec = lift(spec).routes[tensor].reducer.feedback_codec()
    assert codec is not None
    return codec


def test_dhqc_of_one_level_is_stc_and_hierarchy_signmean_bit_for_bit() -> None:
    for a, b in zip(play("dhqc(density=0.05, levels=1)"), play("stc(density=0.05)"), strict=True):
        assert same(a, b)
    one, mean = parse("hierarchy(levels=1)"), parse("signmean()")
    for n in (0, 1, 2, 100, 4099, 65537):
        for seed in range(5):
            x = torch.randn(n, generator=torch.Generator().manual_seed(seed)) ** 3
            wire = one.encode(x)
            assert torch.equal(wire, mean.encode(x))
            assert torch.equal(one.decode(wire, n), mean.decode(wire, n))


@for_each("density", [0.05, 1.0])
def test_stc_is_the_papers_recursion(density: float) -> None:
    """A <- A + g; the k largest become m * sign, m their mean; A keeps the rest. To float32 sums."""
    size = 2
    got = play(f"stc(density={density})", size)[0]
    memory = {(r, e.name): torch.zeros(e.numel) for r in range(size) for e in MODEL if len(e.shape) > 1}
    for t in range(STEPS):
        for entry in (e for e in MODEL if len(e.shape) > 1):
            where = slice(entry.offset, entry.offset + entry.numel)
            mean = torch.zeros(entry.numel)
            for r in range(size):
                x = memory[r, entry.name].add_(gradient(r, t)[where])
                chosen = x.abs().topk(math.ceil(density * entry.numel)).indices
                sent = torch.zeros_like(x)
                sent[chosen] = x[chosen].abs().mean() * x[chosen].sign()
                x -= sent
                mean += sent / size
            torch.testing.assert_close(got[t][where], mean, rtol=1e-4, atol=1e-4)


def test_stc_never_makes_values_of_zeros() -> None:
    """Where more than n - k entries are zero, a threshold would be zero, and choose everything."""
    x = torch.zeros(1000)
    x[:3] = torch.tensor([1.0, -2.0, 3.0])
    codec = of("stc(density=0.1)")
    assert codec.decode(codec.encode(x), 1000)[:4].tolist() == [2.0, -2.0, 2.0, 0.0]
    assert not codec.decode(codec.encode(x), 1000)[3:].any()


def test_stc_down_has_a_residual_of_its_own() -> None:
    """What the ranks sent = what came back + what the servers keep: nothing is lost on the second leg."""
    size, entry = 3, MODEL["a.weight"]
    where = slice(entry.offset, entry.offset + entry.numel)

    def body(comm):  # type: ignore[no-untyped-def]
        exchange = exchange_on(comm, "stc(density=0.05, down=0.02)")
        return means_of(exchange, comm.rank), exchange.state_dict()

    results = everywhere(size, body)
    given = sum(gradient(r, t)[where].double() for r in range(size) for t in range(STEPS)) / size
    applied = sum(mean[where].double() for mean in results[0][0])

    def kept(kind: str) -> Tensor:
        found = [state[key] for _, state in results for key in state if kind in key and "a.weight" in key]
        return sum(value.flatten().double() for value in found)  # type: ignore[return-value]

    torch.testing.assert_close(applied + kept("residual") / size + kept("server"), given, rtol=0, atol=1e-4)
    assert kept("server").abs().max() > 0
    assert all(same(means, results[0][0]) for means, _ in results)


def test_methods_are_as_small_as_they_say() -> None:
    """Message bytes of a layer of 2.4 million normal numbers against float32."""
    x = torch.randn(2_359_296, generator=torch.Generator().manual_seed(0))
    for density, times in ((0.01, 340), (0.0025, 1000)):
        assert 4 * x.numel() >= times * of(f"stc(density={density})").encode(x).numel()
    layout = Layout.of([("w", (300, 200)), ("b", (200,))])
    x = torch.randn(60_000, generator=torch.Generator().manual_seed(3))
    for spec in (*PAPERS, "fastsgd()"):
        assert of(spec).encode(x).numel() + 800 <= lift(spec).nbytes(layout)


@for_each("spec", [*PAPERS, "fastsgd()", "fastsgd(base=1.5, floor=4)"])
def test_vectors_arrive_exactly_and_replicas_agree(spec: str) -> None:
    means = play(spec)
    for of_rank in means[1:]:
        assert same(of_rank, means[0])
    entry = MODEL["a.bias"]
    where = slice(entry.offset, entry.offset + entry.numel)
    exact = sum(gradient(r, 0)[where].double() for r in range(3)) / 3
    torch.testing.assert_close(means[0][0][where].double(), exact, rtol=1e-5, atol=1e-5)


@for_each("spec", PAPERS)
def test_buckets_do_not_matter(spec: str) -> None:
    def body(comm):  # type: ignore[no-untyped-def]
        whole, pieces = exchange_on(comm, spec), exchange_on(comm, spec)
        steps = [(gradient(comm.rank, t), cut(MODEL, 1, 3) if t < 2 else cut(MODEL, 2, 2)) for t in range(4)]
        return [
            torch.equal(one_step(whole, g, [MODEL])[0], one_step(pieces, g, parts)[0]) for g, parts in steps
        ]

    assert all(all(same) for same in everywhere(2, body))


def test_fastsgd_keeps_what_its_floor_says() -> None:
    """Kept if round(log_base(s / |g|)) <= floor, then within a factor sqrt(base); else zero."""
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1)) ** 3
    for base, floor in ((2.0, 0), (2.0, 3), (1.5, 4)):
        codec = of(f"fastsgd(base={base}, floor={floor})")
        back = codec.decode(codec.encode(x), x.numel())
        logs = torch.log(x.abs().max().double() / x.abs().double()) / math.log(base)
        clear = (logs % 1 - 0.5).abs() > 1e-4
        assert torch.equal((back != 0)[clear], (torch.round(logs) <= floor)[clear])
        kept = back != 0
        ratio = (back[kept].double() / x[kept].double()).log() / math.log(base)
        assert float(ratio.abs().max()) <= 0.5 + 1e-5
        assert bool((back[kept].sign() == x[kept].sign()).all())


def test_fastsgds_filter_and_values_agree() -> None:
    """No position is spent on an entry that is then sent as zero, at any scale."""
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(2))
    for scale in (1.0, 1e-30, 1e30, 3.7e-20):
        codec = of("fastsgd(base=1.3, floor=5)")
        chosen = codec.select.select(x * scale)  # type: ignore[attr-defined]
        back = codec.decode(codec.encode(x * scale), x.numel())
        assert int((back != 0).sum()) == chosen.numel() > 100


def test_fastsgd_loses_nothing_for_good() -> None:
    """Of an equal gradient each step, the average over T steps errs by what waits, divided by T."""
    g = gradient(0, 0)

    def body(comm):  # type: ignore[no-untyped-def]
        exchange = exchange_on(comm, "fastsgd()")
        total, errors = torch.zeros_like(g), {}
        for t in range(1, 65):
            total += one_step(exchange, g.clone(), [MODEL])[0]
            errors[t] = float((total / t - g).norm() / g.norm())
        return errors

    (errors,) = everywhere(1, body)
    assert 0 < errors[64] < errors[8] / 4 < errors[1] / 16


def test_what_the_methods_refuse() -> None:
    for spec, message in (
        ("stc(density=0)", "density"),
        ("stc(density=0.1, down=1.5)", "down must be a number in"),
        ("dhqc(levels=0)", "levels must be a whole number in 1..256, got 0"),
        ("sketchml(bins=1)", "bins must be a whole number in 2..65536, got 1"),
        ("fastsgd(floor=-1)", "floor"),
        ("fastsgd(base=4.0)", "base must be a number in"),
        ("logquant(levels=256)", "levels must be a whole number in 1..255"),
        ("above_share(share=0)", "share must be a number in"),
    ):
        refuses(SpecError, message, parse, spec)


def test_logquants_bound_is_reached_by_its_worst_entry() -> None:
    """One entry at the edge of the last level it rounds up to: error (sqrt(base) - 1)^2 of its square."""
    codec = Logquant(base=2.0, levels=15)
    edge = 2.0**-0.5 * 1.0001
    x = torch.tensor([1.0] + [edge] * 10_000)
    error = float((codec.decode(codec.encode(x), x.numel()) - x).double().square().sum())
    norm = float(x.double().square().sum())
    assert 0.99 * codec.omega(x.numel()) <= error / norm <= codec.omega(x.numel())
