"""Bit packing: the same bytes on every target, against Python's integers."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic import kernels
from tests.cases import over

from .targets import agree, integers, refused, wire_of


def by_hand(codes: list[int], bits: int) -> bytes:
    """Return one big integer that holds all codes, as bytes."""
    whole = sum((code & (1 << bits) - 1) << bits * i for i, code in enumerate(codes))
    return whole.to_bytes((len(codes) * bits + 7) // 8, "little")


def check_round_trip(codes: list[int], bits: int) -> None:
    wire = agree(lambda: kernels.pack_bits(integers(codes), bits))
    assert bytes(wire.tolist()) == by_hand(codes, bits)
    back = agree(lambda: kernels.unpack_bits(wire, bits, len(codes)))
    assert back.dtype == torch.int32
    assert torch.equal(back, integers(codes) if bits == 32 else integers(codes) & (1 << bits) - 1)


@over(bits=range(1, 33), n=(0, 1, 7, 8, 9, 31, 64, 65, 1001))
def test_packing_is_one_long_integer(bits: int, n: int) -> None:
    rng = torch.Generator().manual_seed(bits)
    check_round_trip(torch.randint(-(2**31), 2**31, (n,), generator=rng).tolist(), bits)


@settings(max_examples=50, deadline=None)
@given(codes=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=70), bits=st.integers(1, 32))
def test_any_codes_of_any_width(codes: list[int], bits: int) -> None:
    check_round_trip(codes, bits)


@over(bits=(1, 3, 8, 11, 16, 25, 32))
def test_a_wire_at_any_byte(bits: int) -> None:
    codes = integers(range(100)) & (1 << bits) - 1
    wire = kernels.pack_bits(codes, bits)
    for shift in range(1, 9):
        larger = torch.cat([wire.new_full((shift,), 255), wire, wire.new_full((9,), 255)])
        moved = larger[shift : shift + wire.numel()]
        assert torch.equal(agree(lambda m=moved: kernels.unpack_bits(m, bits, 100)), codes)


@over(bits=(1, 3, 5, 13, 31))
def test_wrong_lengths_and_padding_are_refused(bits: int) -> None:
    wire = kernels.pack_bits(torch.ones(13, dtype=torch.int32), bits)
    for bad in (wire[:-1], torch.cat([wire, wire.new_zeros(1)]), wire[:0]):
        refused("fill", lambda b=bad: kernels.unpack_bits(b, bits, 13))
    wire[-1] |= 128
    refused("must be zero", lambda: kernels.unpack_bits(wire, bits, 13))


def test_widths_and_types_are_checked() -> None:
    codes, nothing = torch.zeros(3, dtype=torch.int32), wire_of()
    for bits in (0, 33, -1):
        calls = (
            lambda b=bits: kernels.pack_bits(codes, b),
            lambda b=bits: kernels.unpack_bits(codes.view(torch.uint8), b, 3),
        )
        refused(r"1\.\.32", *calls, error=ValueError)
    refused("int32", lambda: kernels.pack_bits(codes.to(torch.int64), 4), error=ValueError)
    refused("contiguous", lambda: kernels.pack_bits(integers(range(6))[::2], 4), error=ValueError)
    refused("negative", lambda: kernels.unpack_bits(nothing, 4, -1), error=ValueError)


def in_base_3(levels: list[int]) -> list[int]:
    """Return five levels per byte, digit by digit."""
    digits = [level % 3 for level in levels] + [0] * (-len(levels) % 5)
    return [sum(digits[at + i] * 3**i for i in range(5)) for at in range(0, len(digits), 5)]


@over(n=(*range(12), 100, 5119, 5120, 5121, 10_243))
def test_five_levels_make_a_byte(n: int) -> None:
    levels = torch.randint(-1, 2, (n,), generator=torch.Generator().manual_seed(n)).int()
    wire = agree(lambda: kernels.pack_ternary(levels))
    assert wire.dtype == torch.uint8 and wire.tolist() == in_base_3(levels.tolist())
    back = agree(lambda: kernels.unpack_ternary(wire, n))
    assert back.dtype == torch.int32 and torch.equal(back, levels)


def test_all_243_bytes_are_read_and_no_other() -> None:
    wire = torch.arange(243).to(torch.uint8)
    levels = agree(lambda: kernels.unpack_ternary(wire, 5 * 243))
    assert len({tuple(five) for five in levels.view(-1, 5).tolist()}) == 243
    assert torch.equal(agree(lambda: kernels.pack_ternary(levels)), wire)
    for byte in range(243, 256):
        bad = wire_of(0, byte, 0)
        refused(f"at most 242, got {byte}", lambda b=bad: kernels.unpack_ternary(b, 15))


@over(n=range(1, 5))
def test_ternary_padding_and_lengths(n: int) -> None:
    for byte in range(243):
        wire = wire_of(7, byte)
        if byte < 3**n:
            assert agree(lambda w=wire: kernels.unpack_ternary(w, 5 + n)).numel() == 5 + n
        else:
            refused("must be zero", lambda w=wire: kernels.unpack_ternary(w, 5 + n))
    for wrong in (4, 5, 11):
        refused(r"base 3, got 2", lambda w=wrong: kernels.unpack_ternary(wire_of(0, 0), w))


@over(bad=(2, -2, 3, 127, 2**31 - 1, -(2**31)))
def test_a_level_beyond_one_is_refused(bad: int) -> None:
    levels = integers([0] * 13 + [bad] + [0] * 6)
    match = f"-1, 0 or 1, got .*{bad}.*pack_bits"
    refused(match, lambda: kernels.pack_ternary(levels), error=ValueError)
