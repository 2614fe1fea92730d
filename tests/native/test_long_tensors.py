"""Tensors about as long as an int32 position can reach: exact up to 2^31 elements, refused beyond."""

from __future__ import annotations

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

from ..laws.table import LIVE, specs

REACH = 1 << 31
BEYOND = REACH + 64
NEAR = (REACH - 64, REACH - 1, REACH)
pytestmark = pytest.mark.parametrize("live", LIVE)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """Float32 (BEYOND,) in a file without blocks: what is not written takes no memory."""
    path: Path = tmp_path_factory.mktemp("long") / "x"
    return torch.from_file(str(path), shared=True, size=BEYOND)


@pytest.mark.parametrize("spec", [spec for spec in specs(Codec) if isinstance(parse(spec), Sparse)])
def test_a_sparse_codec_refuses_what_positions_cannot_reach(live: str, spec: str, long: Tensor) -> None:
    with kernels.using(live), pytest.raises(ValueError, match=f"at most {REACH} elements, got {BEYOND}"):
        parse(spec).encode(long)


@pytest.mark.parametrize("spec", specs(Selector))
def test_a_selector_refuses_it(live: str, spec: str, long: Tensor) -> None:
    with kernels.using(live), pytest.raises(ValueError, match=f"at most {REACH} elements, got {BEYOND}"):
        parse(spec).select(long)


def test_reading_and_writing_entries_refuse_it(live: str, long: Tensor) -> None:
    indices, counts = torch.tensor([-1], dtype=torch.int32), torch.tensor([1])  # unsigned, -1 is 2^32 - 1
    segments = Segments.whole(BEYOND)
    with kernels.using(live):
        for call in (
            lambda: kernels.gather(long, segments, indices, counts),
            lambda: kernels.scatter_add_(long, segments, indices, counts, torch.ones(1)),
            lambda: kernels.scatter_zero_(long, segments, indices, counts),
        ):
            with pytest.raises(ValueError, match=f"at most {REACH} elements"):
                call()


@pytest.mark.parametrize("start", [0, 64])
def test_the_last_entries_are_read_and_written(live: str, long: Tensor, start: int) -> None:
    segments, counts = Segments((start,), (REACH,)), torch.tensor([3])
    indices = torch.tensor([0, REACH - 2, REACH - 1], dtype=torch.int32)
    with kernels.using(live):
        kernels.scatter_add_(long, segments, indices, counts, torch.tensor([1.0, 2.0, 3.0]))
        assert kernels.gather(long, segments, indices, counts).tolist() == [1, 2, 3]
        assert long[start + REACH - 3 : start + REACH].tolist() == [0, 2, 3]
        kernels.scatter_zero_(long, segments, indices, counts)
        assert kernels.gather(long, segments, indices, counts).tolist() == [0, 0, 0]


@pytest.mark.parametrize("spec", specs(IndexCoding))
@pytest.mark.parametrize("n", NEAR)
def test_a_coding_holds_the_last_positions(live: str, spec: str, n: int) -> None:
    coding, counts, segments = parse(spec), torch.tensor([0, 4, 1]), Segments.consecutive([3, n, 2])
    indices = torch.tensor([0, n // 2, n - 2, n - 1, 1], dtype=torch.int32)
    with kernels.using(live):
        wire = coding.encode(indices, counts, segments)
        assert wire.numel() <= coding.nbytes(4, n) + coding.nbytes(1, 2)
        assert torch.equal(coding.decode(wire, counts, segments), indices)


@pytest.mark.parametrize("spec", specs(IndexCoding))
def test_a_coding_refuses_longer_tensors(live: str, spec: str) -> None:
    coding, counts = parse(spec), torch.tensor([1])
    wire = coding.encode(torch.zeros(1, dtype=torch.int32), counts, Segments.whole(REACH))
    with kernels.using(live), pytest.raises(ValueError, match=f"at most {REACH} elements"):
        coding.decode(wire, counts, Segments.whole(BEYOND))


@pytest.mark.parametrize("n", NEAR)
def test_random_positions_reach_the_end(live: str, n: int) -> None:
    with kernels.using(live):
        indices, _ = kernels.random_indices(torch.tensor([n]), torch.tensor([500]), (3,))
    assert bool((indices.diff(prepend=indices.new_tensor([-1])) > 0).all())
    assert 0.9 * n < int(indices.max()) < n


def test_a_message_has_room_for_32_bits_of_bytes(live: str) -> None:
    assert counts_bytes(torch.tensor([2**32 - 1])).tolist() == [255] * 4
    with pytest.raises(ValueError, match=f"got {2**32}: choose a smaller density"):
        counts_bytes(torch.tensor([2**32]))


@pytest.mark.soak
@pytest.mark.parametrize("n", NEAR)
@pytest.mark.parametrize("spec", ["topk(density=1e-9)", "sampled_topk(density=1e-8)", "threshold(value=1.0)"])
def test_a_selector_finds_the_last_entries(live: str, spec: str, n: int, long: Tensor) -> None:
    if live == "reference":
        pytest.skip("plain torch takes 8 n bytes")
    at = [5, n // 2, n - 2, n - 1]
    long[at] = 2.0
    with kernels.using(live):
        found = parse(spec).select(long[:n])
    long[at] = 0.0
    assert set(found.tolist()) <= set(at) and found.numel() >= min(3, parse(spec).max_count(n))
