"""Gaps in units: the widths are the best that trying all can find, the wire is as spelt by hand."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels.gap_widths.widths import best_widths

ALL = list(kernels.runnable())
each_target = pytest.mark.parametrize("name", ALL)


def gaps_of(part: list[int]) -> list[int]:
    return [b - a - 1 for a, b in zip([-1, *part], part, strict=False)]


def message_byteswith(gaps: list[int], widths: tuple[int, ...]) -> int:
    """All bits of a tensor's wire with these widths."""
    flag_bits = len(widths).bit_length() - 1
    lengths = [gap.bit_length() for gap in gaps]
    fitting = sum(next(width for width in widths if width >= length) for length in lengths)
    return 2 + 5 * len(widths) + flag_bits * len(gaps) + fitting


def by_hand(indices: Tensor, counts: Tensor) -> bytes:
    wire = b""
    for part in torch.split(indices, counts.tolist()) if counts.numel() else ():
        gaps = gaps_of(part.tolist())
        if not gaps:
            continue
        widths = best_widths([sum(gap.bit_length() == length for gap in gaps) for length in range(32)])
        flag_bits = len(widths).bit_length() - 1
        units = [next(u for u, width in enumerate(widths) if width >= gap.bit_length()) for gap in gaps]
        fields = [(flag_bits, 2), *((width, 5) for width in widths), *((unit, flag_bits) for unit in units)]
        fields += [(gap, widths[unit]) for gap, unit in zip(gaps, units, strict=True)]
        bits = "".join(format(value, f"0{width}b")[::-1] if width else "" for value, width in fields)
        bits += "0" * (-len(bits) % 8)
        wire += bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))
    return wire


def some(seed: int) -> tuple[Tensor, Tensor, Segments]:
    """Sets in up to five segments: spread, clustered, empty and full."""
    rng = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 400, (seed % 6,), generator=rng).tolist()
    sets = []
    for n in sizes:
        chance = torch.rand(n, generator=rng) ** (1 + seed % 4)
        chance[n // 3 : n // 2] *= seed % 3
        sets.append((chance > (0.2, 0.9, 0.99, -1.0, 3.0)[seed % 5]).nonzero().flatten())
    indices = torch.cat([torch.zeros(0, dtype=torch.int64), *sets]).int()
    counts = torch.tensor([part.numel() for part in sets], dtype=torch.int64)
    return indices, counts, Segments.consecutive(sizes)


def test_the_widths_are_the_best_of_all() -> None:
    """Against every choice of 1, 2 or 4 widths, and of 8 among few lengths."""
    rng = torch.Generator().manual_seed(0)
    for trial in range(60):
        lengths = torch.randint(0, 5 + trial % 6, (1 + trial * 3,), generator=rng).tolist()
        gaps = [1 << length - 1 if length else 0 for length in lengths]
        longest = max(lengths)
        widths = best_widths([lengths.count(length) for length in range(32)])
        tried = [
            (*rest, longest) for units in (1, 2, 4, 8) for rest in combinations(range(longest), units - 1)
        ]
        assert message_byteswith(gaps, widths) == min(message_byteswith(gaps, each) for each in tried)


@each_target
def test_wires_as_spelt_by_hand(name: str) -> None:
    with kernels.using(name):
        for seed in range(60):
            indices, counts, segments = some(seed)
            wire = kernels.gap_widths_encode(indices, counts, segments)
            assert bytes(wire.tolist()) == by_hand(indices, counts), seed
            assert torch.equal(kernels.gap_widths_decode(wire, counts, segments), indices)


def test_all_targets_refuse_alike() -> None:
    rng = torch.Generator().manual_seed(1)
    refused = accepted = 0
    for seed in range(120):
        indices, counts, segments = some(seed)
        bad = kernels.gap_widths_encode(indices, counts, segments)
        if not bad.numel():
            continue
        bad[int(torch.randint(0, bad.numel(), (1,), generator=rng))] ^= 1 << seed % 8
        got = []
        for name in ALL:
            with kernels.using(name):
                try:
                    got.append(kernels.gap_widths_decode(bad, counts, segments))
                except WireError:
                    got.append(None)
        assert len({each is None for each in got}) == 1
        if got[0] is None:
            refused += 1
        else:
            accepted += 1
            assert all(each is not None and torch.equal(each, got[0]) for each in got)
            assert torch.equal(kernels.gap_widths_encode(got[0], counts, segments), bad)
    assert refused > 10 and accepted > 10


@each_target
def test_decoder_refuses_what_no_encoder_makes(name: str) -> None:
    """Two positions of 8, gaps 0 and 4: [00 | 3 | 000 001]."""

    def refused(bits: str, message: str) -> None:
        bits += "0" * (-len(bits) % 8)
        wire = [int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8)]
        with pytest.raises(WireError, match=message):
            kernels.gap_widths_decode(
                torch.tensor(wire, dtype=torch.uint8), torch.tensor([2]), Segments.whole(8)
            )

    with kernels.using(name):
        assert kernels.gap_widths_decode(
            torch.tensor([12, 16], dtype=torch.uint8), torch.tensor([2]), Segments.whole(8)
        ).tolist() == [0, 5]
        refused("", "ends before")
        refused("00" + "11000", "ends before")  # no gaps
        refused("11" + "00000", "ends before")  # eight widths, and no room for them
        refused("00" + "11000" + "000" + "111", "outside")  # the second at 8 of 8
        refused("00" + "11000" + "000" + "001" + "1", "must be zero")
        refused("00" + "11000" + "000" + "001" + "000" + "0" * 8, "goes on")
        refused("00" + "00100" + "0000" + "0010", "better widths")  # in 4 bits, where 3 do
        refused("10" + "00000" + "11000" + "01" + "001", "better widths")  # two units, where one is less


def test_the_bound_is_reached_within_a_third() -> None:
    """One lone position needs its header and its gap; many random ones nearly what the bound says."""
    assert kernels.gap_widths_bound(1, 2**31) == (7 + 31 + 7) // 8
    n = 1_000_000
    indices = (torch.rand(n, generator=torch.Generator().manual_seed(0)) < 0.01).nonzero().flatten().int()
    wire = kernels.gap_widths_encode(indices, torch.tensor([indices.numel()]), Segments.whole(n))
    assert (
        0.66 * kernels.gap_widths_bound(indices.numel(), n)
        <= wire.numel()
        <= kernels.gap_widths_bound(indices.numel(), n)
    )
