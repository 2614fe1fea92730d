"""CGX as a method: what it compresses, the same bits however buckets are cut, and that it trains."""

from __future__ import annotations

import torch
from tests.laws.worlds import MODEL, cut, everywhere, exchange_on, gradient, one_step, take
from tests.unit.shared import for_each

from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.exchange.method import lift

SPECS = ("cgx(min_size=100)", "cgx(bits=2, block=64, rounding='stochastic', min_size=1, pattern='ring')")


def test_large_matrices_are_compressed_and_the_rest_is_summed() -> None:
    layout = Layout.of([("w", (32, 32)), ("small", (31, 33)), ("bias", (5000,)), ("conv", (4, 4, 8, 8))])
    compressed, summed = lift("cgx()").assign(layout)
    assert compressed.names == ("w", "conv") and summed.names == ("small", "bias")
    assert lift("cgx()").nbytes(layout) == 2 * (512 + 2 * 8) + 4 * (31 * 33 + 5000)


@for_each("spec", SPECS)
def test_buckets_do_not_matter(spec: str) -> None:
    """However DDP cuts its buckets, also when it regroups them in mid-run: the same bits."""

    def play(comm):  # type: ignore[no-untyped-def]
        whole, pieces = exchange_on(comm, spec), exchange_on(comm, spec)
        same = []
        for t in range(4):
            expected, _ = one_step(whole, gradient(comm.rank, t), [MODEL])
            got, _ = one_step(
                pieces, gradient(comm.rank, t), cut(MODEL, 1, 3) if t < 2 else cut(MODEL, 2, 1, 1)
            )
            same.append(torch.equal(expected, got))
        return same

    assert all(all(same) for same in everywhere(3, play))


def test_the_mean_is_near_and_a_tensor_larger_than_all_others_together_is_whole() -> None:
    layout = Layout.of([("a", (3, 400)), ("huge", (1500, 1000)), ("b", (40, 40))])

    def play(comm):  # type: ignore[no-untyped-def]
        exchange = exchange_on(comm, "cgx(bits=8)", layout=layout)
        return one_step(exchange, gradient(comm.rank, 0, layout), cut(layout, 1, 1, 1))[0]

    means = everywhere(4, play)
    plain = sum(gradient(rank, 0, layout) for rank in range(4)) / 4
    for entry in layout:
        alone = Layout.of([(entry.name, entry.shape)])
        ours, theirs = take(means[0], layout, alone), take(plain, layout, alone)
        assert (ours - theirs).norm() < 0.04 * theirs.norm()  # cubes: few are as large as the ends
    assert all(torch.equal(mean, means[0]) for mean in means)


def test_it_is_written_as_it_is_read() -> None:
    spec = "cgx(bits=3, block=100, rounding='stochastic', pattern='tree', min_size=7)"
    assert repr(parse(spec)) == spec
