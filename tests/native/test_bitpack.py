"""Bit packing: the same bytes on every target, against Python's integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic import kernels
from laconic.core.errors import WireError

ALL = list(kernels.runnable())
SIZES = (0, 1, 7, 8, 9, 31, 64, 65, 1001)


def by_hand(codes: list[int], bits: int) -> bytes:
    """One big integer that holds all codes, as bytes."""
    whole = sum((code & (1 << bits) - 1) << bits * i for i, code in enumerate(codes))
    return whole.to_bytes((len(codes) * bits + 7) // 8, "little")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bits", range(1, 33))
def test_packing_is_one_long_integer(name: str, bits: int) -> None:
    rng = torch.Generator().manual_seed(bits)
    with kernels.using(name):
        for n in SIZES:
            codes = torch.randint(-(2**31), 2**31, (n,), generator=rng).to(torch.int32)
            wire = kernels.pack_bits(codes, bits)
            assert bytes(wire.tolist()) == by_hand(codes.tolist(), bits)
            back = kernels.unpack_bits(wire, bits, n)
            assert back.dtype == torch.int32
            low = codes if bits == 32 else codes & (1 << bits) - 1
            assert torch.equal(back, low)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=50, deadline=None)
@given(codes=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=70), bits=st.integers(1, 32))
def test_any_codes_of_any_width(name: str, codes: list[int], bits: int) -> None:
    with kernels.using(name):
        wire = kernels.pack_bits(torch.tensor(codes, dtype=torch.int32), bits)
        assert bytes(wire.tolist()) == by_hand(codes, bits)
        again = kernels.pack_bits(kernels.unpack_bits(wire, bits, len(codes)), bits)
        assert torch.equal(again, wire)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bits", [1, 3, 8, 11, 16, 25, 32])
def test_a_wire_at_any_byte(name: str, bits: int) -> None:
    codes = torch.arange(100, dtype=torch.int32)
    with kernels.using(name):
        wire = kernels.pack_bits(codes, bits)
        for shift in range(1, 9):
            larger = torch.cat([wire.new_full((shift,), 255), wire, wire.new_full((9,), 255)])
            moved = larger[shift : shift + wire.numel()]
            assert torch.equal(kernels.unpack_bits(moved, bits, 100), kernels.unpack_bits(wire, bits, 100))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bits", [1, 3, 5, 13, 31])
def test_wrong_lengths_and_padding_are_refused(name: str, bits: int) -> None:
    codes = torch.ones(13, dtype=torch.int32)
    with kernels.using(name):
        wire = kernels.pack_bits(codes, bits)
        for bad in (wire[:-1], torch.cat([wire, wire.new_zeros(1)]), wire[:0]):
            with pytest.raises(WireError, match="fill"):
                kernels.unpack_bits(bad, bits, 13)
        padded = wire.clone()
        padded[-1] |= 128
        with pytest.raises(WireError, match="must be zero"):
            kernels.unpack_bits(padded, bits, 13)


def test_widths_and_types_are_checked() -> None:
    codes = torch.zeros(3, dtype=torch.int32)
    for bits in (0, 33, -1):
        with pytest.raises(ValueError, match=r"1\.\.32"):
            kernels.pack_bits(codes, bits)
        with pytest.raises(ValueError, match=r"1\.\.32"):
            kernels.unpack_bits(codes.view(torch.uint8), bits, 3)
    with pytest.raises(ValueError, match="int32"):
        kernels.pack_bits(codes.to(torch.int64), 4)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.pack_bits(torch.zeros(6, dtype=torch.int32)[::2], 4)
    with pytest.raises(ValueError, match="negative"):
        kernels.unpack_bits(torch.zeros(0, dtype=torch.uint8), 4, -1)


def in_base_3(levels: list[int]) -> list[int]:
    """Five levels a byte, digit by digit."""
    digits = [{0: 0, 1: 1, -1: 2}[level] for level in levels] + [0] * (-len(levels) % 5)
    return [sum(digits[at + i] * 3**i for i in range(5)) for at in range(0, len(digits), 5)]


@pytest.mark.parametrize("name", ALL)
def test_five_levels_make_a_byte(name: str) -> None:
    rng = torch.Generator().manual_seed(3)
    with kernels.using(name):
        for n in (*range(12), 100, 5119, 5120, 5121, 10_243):
            levels = torch.randint(-1, 2, (n,), generator=rng).to(torch.int32)
            wire = kernels.pack_ternary(levels)
            assert wire.dtype == torch.uint8 and wire.tolist() == in_base_3(levels.tolist())
            back = kernels.unpack_ternary(wire, n)
            assert back.dtype == torch.int32 and torch.equal(back, levels)


@pytest.mark.parametrize("name", ALL)
def test_all_243_bytes_are_read_and_no_other(name: str) -> None:
    with kernels.using(name):
        wire = torch.arange(243).to(torch.uint8)
        levels = kernels.unpack_ternary(wire, 5 * 243)
        assert len({tuple(five) for five in levels.view(-1, 5).tolist()}) == 243
        assert torch.equal(kernels.pack_ternary(levels), wire)
        for byte in range(243, 256):
            with pytest.raises(WireError, match=f"at most 242, got {byte}"):
                kernels.unpack_ternary(torch.tensor([0, byte, 0], dtype=torch.uint8), 15)


@pytest.mark.parametrize("name", ALL)
def test_ternary_padding_and_lengths(name: str) -> None:
    with kernels.using(name):
        for n in range(1, 5):
            for byte in range(243):
                wire = torch.tensor([7, byte], dtype=torch.uint8)
                if byte < 3**n:
                    assert kernels.unpack_ternary(wire, 5 + n).numel() == 5 + n
                else:
                    with pytest.raises(WireError, match="must be zero"):
                        kernels.unpack_ternary(wire, 5 + n)
        for n in (4, 5, 11):
            with pytest.raises(WireError, match=r"base 3, got 2"):
                kernels.unpack_ternary(torch.zeros(2, dtype=torch.uint8), n)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [2, -2, 3, 127, 2**31 - 1, -(2**31)])
def test_a_level_beyond_one_is_refused(name: str, bad: int) -> None:
    levels = torch.zeros(20, dtype=torch.int32)
    levels[13] = bad
    with kernels.using(name), pytest.raises(ValueError, match=f"-1, 0 or 1, got .*{bad}.*pack_bits"):
        kernels.pack_ternary(levels)
