"""Selection against brute force, and every native implementation against the reference, bit for bit."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from laconic import kernels
from laconic.core.layout import Segments
from laconic.kernels.checks import keys64
from laconic.kernels.select import batched, reference
from laconic.kernels.select.sample import dgc_sampling, exact_sampling, sample_offsets
from tests.cases import over

from .targets import agree


def normal(n: int, rng: torch.Generator) -> Tensor:
    return torch.randn(n, generator=rng)


def heavy(n: int, rng: torch.Generator) -> Tensor:
    return torch.randn(n, generator=rng) / torch.randn(n, generator=rng).abs().clamp(min=1e-6) ** 2


def constant(n: int, rng: torch.Generator) -> Tensor:
    return torch.full((n,), -1.5)


def zeros(n: int, rng: torch.Generator) -> Tensor:
    return torch.where(torch.rand(n, generator=rng) < 0.5, torch.tensor(0.0), torch.tensor(-0.0))


def mostly_zero(n: int, rng: torch.Generator) -> Tensor:
    return torch.randn(n, generator=rng) * (torch.rand(n, generator=rng) < 0.001)


def few_levels(n: int, rng: torch.Generator) -> Tensor:
    return torch.randint(-3, 4, (n,), generator=rng).float()


def denormal(n: int, rng: torch.Generator) -> Tensor:
    return torch.randint(0, 1000, (n,), generator=rng, dtype=torch.int32).view(torch.float32)


def spoiled(n: int, rng: torch.Generator) -> Tensor:
    x = torch.randn(n, generator=rng)
    where = torch.rand(n, generator=rng)
    x[where < 0.02] = float("nan")
    x[where > 0.98] = float("-inf")
    return x


def sawtooth(n: int, rng: torch.Generator) -> Tensor:
    return (torch.arange(n) % 97 == 0).float() * torch.rand(n, generator=rng) + 1e-3


INPUTS = {
    make.__name__: make
    for make in (normal, heavy, constant, zeros, mostly_zero, few_levels, denormal, spoiled, sawtooth)
}
SEGMENTS = {
    "empty": Segments.whole(0),
    "one": Segments.whole(1),
    "whole": Segments.whole(20_001),
    "apart": Segments((3, 1, 5, 4000, 9000), (2, 1, 0, 4097, 33)),
    "many": Segments.consecutive([1, 2, 0, 15, 16, 17, 63, 64, 65, 1001, 2047, 2048, 2049, 20_011]),
}


def brute(x: Tensor, k: int) -> list[int]:
    """The k largest by Python's stable sort: larger |x| first, lower index first, no zeros and no NaN."""
    items = [(-abs(v), i) for i, v in enumerate(x.tolist()) if v != 0 and not math.isnan(v)]
    return sorted(i for _, i in sorted(items)[:k])


def split(chosen: tuple[Tensor, Tensor]) -> list[list[int]]:
    indices, counts = chosen
    assert indices.dtype == torch.int32
    assert counts.dtype == torch.int64
    return [part.tolist() for part in indices.split(counts.tolist())]


@over(make=INPUTS, segments=SEGMENTS, density=(0.0, 0.001, 0.04, 0.3, 1.0))
def test_topk_is_brute_force(make: Callable[..., Tensor], segments: Segments, density: float) -> None:
    x = make(segments.end + 7, torch.Generator().manual_seed(1))
    ks = torch.tensor([math.ceil(density * size) for size in segments.sizes])
    found = split(agree(lambda: kernels.topk(x, segments, ks)))
    for view, k, indices in zip(segments.views(x), ks.tolist(), found, strict=True):
        assert indices == brute(view, k)


@over(make={name: INPUTS[name] for name in ("normal", "heavy", "few_levels", "sawtooth")})
def test_topk_of_a_large_tensor(make: Callable[..., Tensor]) -> None:
    """Large enough for a sample of n / 256, and for one that misleads (`sawtooth`, `few_levels`)."""
    x = make(1_500_007, torch.Generator().manual_seed(7))
    whole = Segments.whole(x.numel())
    for k in (1, 1500, 60_000):
        indices, _ = agree(lambda k=k: kernels.topk(x, whole, torch.tensor([k])))
        order = torch.sort(x.abs(), descending=True, stable=True).indices[:k]
        assert torch.equal(indices.long(), order.sort().values)


def test_topk_takes_more_than_there_is() -> None:
    x = torch.tensor([0.0, 2.0, float("nan"), -1.0])
    indices, counts = agree(lambda: kernels.topk(x, Segments.whole(4), torch.tensor([9])))
    assert (indices.tolist(), counts.tolist()) == ([1, 3], [2])


@over(make=INPUTS, segments=SEGMENTS, density=(0.001, 0.04, 0.3))
def test_sampled_topk_is_what_passed_the_threshold(
    make: Callable[..., Tensor], segments: Segments, density: float
) -> None:
    x = make(segments.end, torch.Generator().manual_seed(2))
    ks = torch.tensor([math.ceil(density * size) for size in segments.sizes])
    for seed in range(3):
        keys = [(seed << 62) + 1000 * seed + i for i in range(len(segments))]
        found = split(agree(lambda k=keys: kernels.sampled_topk(x, segments, ks, density, 0.01, k)))
        for view, k, indices in zip(segments.views(x), ks.tolist(), found, strict=True):
            exact = brute(view, k)
            assert len(indices) <= k
            assert len(indices) >= min(len(exact), 0.8 * k)
            if len(indices) == len(exact) or view.numel() <= math.ceil(2 / density):
                assert indices == exact
            elif indices:  # all that reach a threshold: nothing outside is larger than the least inside
                least = view[indices].abs().min()
                assert int((view.abs() >= least).sum()) == len(indices)


@over(rounds=(0, 1, 10))
def test_few_rounds_end_in_the_exact_selection(rounds: int) -> None:
    x = torch.randn(70_001, generator=torch.Generator().manual_seed(3))
    ks = torch.tensor([71])
    whole = Segments.whole(x.numel())
    for key in range(20):
        indices, _ = agree(lambda k=key: kernels.sampled_topk(x, whole, ks, 0.001, 0.01, [k], 0.99, rounds))
        assert 0.99 * 71 <= indices.numel() <= 71


@over(make=INPUTS, threshold=(0.0, 1e-40, 0.5, 3.0, float("inf")))
def test_above_is_every_entry_that_reaches_the_threshold(
    make: Callable[..., Tensor], threshold: float
) -> None:
    segments = SEGMENTS["many"]
    x = make(segments.end, torch.Generator().manual_seed(4))
    levels = torch.full((len(segments),), threshold)
    least = levels[0].item()
    found = split(agree(lambda: kernels.above(x, segments, levels)))
    for view, indices in zip(segments.views(x), found, strict=True):
        assert indices == [i for i, v in enumerate(view.tolist()) if abs(v) >= least and v != 0]


def test_above_refuses_a_threshold_that_is_not_one() -> None:
    for bad in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="threshold must not be negative"):
            kernels.above(torch.ones(3), Segments.whole(3), torch.tensor([bad]))


@over(offset=(0, 1, 3, 7, 13), n=(1, 15, 16, 17, 100, 5000, 8000))
def test_selection_at_any_alignment(offset: int, n: int) -> None:
    store = torch.randn(9000, generator=torch.Generator().manual_seed(5))
    part, k = store[offset : offset + n], torch.tensor([max(1, n // 50)])
    there, _ = agree(lambda: kernels.topk(store, Segments((offset,), (n,)), k))
    here, _ = agree(lambda: kernels.topk(part, Segments.whole(n), k))
    assert there.tolist() == here.tolist() == brute(part.clone(), int(k))


def test_random_indices_are_distinct_ascending_and_the_same_everywhere() -> None:
    sizes = torch.tensor([0, 1, 2, 3, 4, 5, 16, 17, 100, 1000, 4097, 1 << 20, 1 << 31])
    for share in (0.001, 0.3, 1.0):
        ks = torch.tensor([min(20_000, math.ceil(share * n)) for n in sizes.tolist()])
        keys = [2**64 - 1 - i for i in range(len(sizes))]
        found = split(agree(lambda k=ks, j=keys: kernels.random_indices(sizes, k, j)))
        for indices, n, k in zip(found, sizes.tolist(), ks.tolist(), strict=True):
            assert len(indices) == k
            assert indices == sorted(set(indices))
            assert all(0 <= i < n for i in indices)


@over(n_k=((2, 1), (3, 1), (5, 2), (16, 4), (17, 5), (100, 10), (1000, 10)))
def test_random_indices_are_uniform(n_k: tuple[int, int]) -> None:
    """Each position is chosen with probability k/n: chi-square over many keys, within 5 sigma."""
    trials, (n, k) = 20_000, n_k
    sizes, ks = torch.full((trials,), n), torch.full((trials,), k)
    indices, _ = kernels.random_indices(sizes, ks, range(trials))
    seen = torch.bincount(indices.long(), minlength=n).double()
    expected = trials * k / n
    chi = float(((seen - expected) ** 2).sum() / expected / (1 - k / n))
    assert abs(chi - (n - 1)) < 5 * math.sqrt(2 * (n - 1)) + 5


def test_random_pairs_are_uniform() -> None:
    """Every pair of {0..7} is chosen with probability 1/28, so positions are not tied to each other."""
    trials = 200_000
    indices, _ = kernels.random_indices(torch.full((trials,), 8), torch.full((trials,), 2), range(trials))
    pairs = indices.view(-1, 2).long()
    seen = torch.bincount(pairs[:, 0] * 8 + pairs[:, 1], minlength=64).double()
    seen = seen[seen > 0]
    assert seen.numel() == 28
    chi = float(((seen - trials / 28) ** 2).sum() / (trials / 28))
    assert abs(chi - 27) < 5 * math.sqrt(54)


def test_the_start_of_the_sample_follows_from_the_key() -> None:
    """Equal keys choose equally; different keys see different samples, so thresholds and counts differ."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(6))
    whole, ks = Segments.whole(x.numel()), torch.tensor([1000])

    def count(key: int) -> int:
        return kernels.sampled_topk(x, whole, ks, 0.01, 0.01, [key])[0].numel()

    counts = [count(key) for key in range(40)]
    assert counts == [count(key) for key in range(40)]
    assert all(800 <= c <= 1000 for c in counts)
    assert len(set(counts)) > 5


def test_flushed_denormals_are_still_chosen() -> None:
    tiny = struct.unpack("f", struct.pack("I", 1))[0]
    x = torch.zeros(100)
    x[37] = tiny
    supported = torch.set_flush_denormal(True)
    try:
        found = split(agree(lambda: kernels.topk(x, Segments.whole(100), torch.tensor([3]))))
    finally:
        torch.set_flush_denormal(False)
    if not supported:
        pytest.skip("this CPU cannot flush denormals")
    assert found == [[37]]


@over(make=INPUTS, segments=SEGMENTS, density=(0.0, 0.001, 0.04, 0.3, 1.0))
def test_the_batched_selection_of_gpus_is_the_same(
    make: Callable[..., Tensor], segments: Segments, density: float
) -> None:
    x = make(segments.end + 7, torch.Generator().manual_seed(2))
    ks = torch.tensor([math.ceil(density * size) for size in segments.sizes], dtype=torch.int64)
    sizes, each = segments.sizes, tuple(ks.tolist())
    got = batched.sampled(x, segments, exact_sampling(sizes, each), None, 0.8)
    assert split(got) == split(kernels.topk(x, segments, ks))
    keys = [(1 << 63) + i for i in range(len(segments))]
    if density:
        plan = dgc_sampling(sizes, each, density, 0.01, 0.8, 10)
        got = batched.sampled(x, segments, plan, sample_offsets(plan, keys64(keys, len(segments))), 0.8)
        assert split(got) == split(kernels.sampled_topk(x, segments, ks, density, 0.01, keys))
    levels = torch.full((len(segments),), 2 * density)
    assert split(batched.above(x, segments, levels)) == split(kernels.above(x, segments, levels))


def test_the_last_round_may_end_the_selection() -> None:
    """With rounds=0 the first threshold stands if enough pass it; with keys 7 and 10 fewer than k do."""
    x, ks = torch.randn(70_001, generator=torch.Generator().manual_seed(3)), torch.tensor([71])
    found = {
        (rounds, key): agree(
            lambda r=rounds, k=key: kernels.sampled_topk(
                x, Segments.whole(70_001), ks, 0.001, 0.01, [k], 0.8, r
            )
        )[0].numel()
        for rounds in (0, 1)
        for key in range(20)
    }
    fewer = [case for case, count in found.items() if count < 71]
    assert fewer == [(rounds, key) for rounds in (0, 1) for key in (7, 10)]


def test_operations_do_not_grow_with_tensors() -> None:
    """Views apart; the first call makes tables."""

    class Count(TorchDispatchMode):
        ops = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.ops += not func.is_view
            return func(*args, **(kwargs or {}))

    for batch, most in ((False, 8), (True, 92)):
        counts = set()
        for tensors in (2, 54, 161):
            segments = Segments.consecutive([2500 + i for i in range(tensors)])
            x = torch.randn(segments.end, generator=torch.Generator().manual_seed(8))
            ks = tuple(math.ceil(0.01 * size) for size in segments.sizes)
            plan = dgc_sampling(segments.sizes, ks, 0.01, 0.01, 0.8, 10)
            offsets = torch.zeros(tensors, dtype=torch.int64)
            call = batched.sampled if batch else reference.sampled_topk
            call(x, segments, plan, offsets, 0.8)
            with Count() as count:
                call(x, segments, plan, offsets, 0.8)
            counts.add(count.ops)
        assert len(counts) == 1
        assert max(counts) <= most


def test_bad_arguments_are_named() -> None:
    x, whole, one = torch.ones(4), Segments.whole(4), torch.tensor([1])
    for match, call in (
        ("x has 4 elements, but its segments end at 5", lambda: kernels.topk(x, Segments.whole(5), one)),
        (r"contiguous torch\.float32", lambda: kernels.topk(x.double(), whole, one)),
        ("one value a segment", lambda: kernels.topk(x, whole, torch.tensor([1, 2]))),
        ("one key a segment", lambda: kernels.sampled_topk(x, whole, one, 0.1, 0.1, [])),
    ):
        with pytest.raises(ValueError, match=match):
            call()
