"""Tensors about as long as an int32 position can reach: exact up to 2^31 elements, refused beyond."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs.sparse import Sparse
from laconic.core.codec import Codec
from laconic.core.framing import counts_bytes
from laconic.core.layout import Segments
from laconic.core.selector import IndexCoding, Selector
from laconic.core.spec import parse
from tests.cases import over

from ..laws.table import specs
from .targets import ALL, agree, integers, refused

REACH = 1 << 31
BEYOND = REACH + 64
NEAR = (REACH - 64, REACH - 1, REACH)
MOST = f"at most {REACH} elements"
refused_alike = partial(refused, MOST, error=ValueError)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """Float32 (BEYOND,) in a sparse file: entries that nobody writes take no memory."""
    path: Path = tmp_path_factory.mktemp("long") / "x"
    return torch.from_file(str(path), shared=True, size=BEYOND)


def test_selectors_and_sparse_codecs_refuse_longer_tensors(long: Tensor) -> None:
    for spec in specs(Codec):
        if isinstance(codec := parse(spec), Sparse):
            refused(f"{MOST}, got {BEYOND}", partial(codec.encode, long), error=ValueError)
    for spec in specs(Selector):
        refused(f"{MOST}, got {BEYOND}", partial(parse(spec).select, long), error=ValueError)


def test_reading_and_writing_entries_refuse_longer_tensors(long: Tensor) -> None:
    indices, counts = integers([-1]), torch.tensor([1])  # unsigned, -1 is 2^32 - 1
    where = (long, Segments.whole(BEYOND), indices, counts)
    refused_alike(
        lambda: kernels.gather(*where),
        lambda: kernels.scatter_add_(*where, torch.ones(1)),
        lambda: kernels.scatter_zero_(*where),
    )


@over(start=(0, 64))
def test_the_last_entries_are_read_and_written(long: Tensor, start: int) -> None:
    where = (long, Segments((start,), (REACH,)), integers([0, REACH - 2, REACH - 1]), torch.tensor([3]))

    def written() -> list[list[float]]:
        kernels.scatter_add_(*where, torch.tensor([1.0, 2.0, 3.0]))
        found = [kernels.gather(*where).tolist(), long[start + REACH - 3 : start + REACH].tolist()]
        kernels.scatter_zero_(*where)
        return [*found, kernels.gather(*where).tolist()]

    assert agree(written) == [[1, 2, 3], [0, 2, 3], [0, 0, 0]]


@over(spec=specs(IndexCoding), n=NEAR)
def test_a_coding_holds_the_last_positions(spec: str, n: int) -> None:
    coding, counts, segments = parse(spec), torch.tensor([0, 4, 1]), Segments.consecutive([3, n, 2])
    indices = integers([0, n // 2, n - 2, n - 1, 1])
    wire = agree(lambda: coding.encode(indices, counts, segments))
    assert wire.numel() <= coding.nbytes(4, n) + coding.nbytes(1, 2)
    assert torch.equal(agree(lambda: coding.decode(wire, counts, segments)), indices)
    one = torch.tensor([1])
    wire = coding.encode(integers([0]), one, Segments.whole(REACH))
    refused_alike(lambda: coding.decode(wire, one, Segments.whole(BEYOND)))


@over(n=NEAR)
def test_random_positions_reach_the_end(n: int) -> None:
    indices, _ = agree(lambda: kernels.random_indices(torch.tensor([n]), torch.tensor([500]), (3,)))
    assert bool((indices.diff(prepend=indices.new_tensor([-1])) > 0).all())
    assert 0.9 * n < int(indices.max()) < n


def test_a_message_has_room_for_32_bits_of_bytes() -> None:
    assert counts_bytes(torch.tensor([2**32 - 1])).tolist() == [255] * 4
    with pytest.raises(ValueError, match=f"got {2**32}: choose a smaller density"):
        counts_bytes(torch.tensor([2**32]))


@pytest.mark.soak
@pytest.mark.skipif(len(ALL) == 1, reason="plain torch takes 8 n bytes")
@over(spec=("topk(density=1e-9)", "sampled_topk(density=1e-8)", "threshold(value=1.0)"), n=NEAR)
def test_a_selector_finds_the_last_entries(spec: str, n: int, long: Tensor) -> None:
    at = [5, n // 2, n - 2, n - 1]
    long[at] = 2.0
    found = parse(spec).select(long[:n])
    long[at] = 0.0
    assert set(found.tolist()) <= set(at) and found.numel() >= min(3, parse(spec).max_count(n))
