"""Philox4x32-10 against the known answers of its authors, and its stream cut anywhere."""

from __future__ import annotations

import math

import pytest
import torch

from laconic import kernels
from laconic.kernels.philox import reference
from tests.cases import over

from .targets import agree

# Random123's kat_vectors, "philox4x32 10": counter (4 words), key (2 words), answer (4 words).
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


def test_known_answers() -> None:
    for counter, key, answer in KNOWN:
        made = reference.block(tuple(torch.tensor([word]) for word in words(counter)), words(key))
        assert tuple(int(word) for word in made) == words(answer)
    start = agree(lambda: kernels.philox(0, 4))
    assert tuple(word & 0xFFFFFFFF for word in start.tolist()) == words(KNOWN[0][2])


@over(offset=(0, 1, 2, 3, 4, 61, 64, 2**34 - 70, 2**40 + 3), key=(0, 1, 2**32 + 5, 2**64 - 1))
def test_a_stream_is_the_same_wherever_it_is_cut(offset: int, key: int) -> None:
    """2^34 - 70 crosses the carry from the counter's first word to its second."""
    expected = agree(lambda: kernels.philox(key, 300, offset))
    for n in (0, 1, 2, 3, 63, 64, 65, 300):
        first, last = agree(lambda n=n: [kernels.philox(key, n, at) for at in (offset, offset + 300 - n)])
        assert torch.equal(first, expected[:n]) and torch.equal(last, expected[300 - n :])


def test_uniform_is_the_top_24_bits() -> None:
    u, bits = agree(lambda: [kernels.uniform(9, 5000, 7), kernels.philox(9, 5000, 7)])
    assert torch.equal(u, ((bits.long() & 0xFFFFFFFF) >> 8).float() / 2**24)
    assert 0 <= float(u.min()) <= float(u.max()) < 1


def test_uniform_is_uniform() -> None:
    """Mean, variance and 64 bins of 2^20 draws, each within 5 standard deviations."""
    n = 1 << 20
    u = kernels.uniform(12345, n).double()
    assert abs(float(u.mean()) - 0.5) < 5 / math.sqrt(12 * n)
    assert abs(float(u.var()) - 1 / 12) < 5 / math.sqrt(180 * n)
    bins = torch.histc(u, 64, 0, 1)
    chi = float(((bins - n / 64) ** 2).sum() / (n / 64))
    assert abs(chi - 63) < 5 * math.sqrt(126)


def test_keys_and_neighbours_are_independent() -> None:
    """Correlation of neighbouring keys, and of neighbouring elements, within 5 sigma of none."""
    n = 1 << 18
    a, b = kernels.uniform(1, n) - 0.5, kernels.uniform(2, n) - 0.5
    for left, right in ((a, b), (a[1:], a[:-1]), (a[4:], a[:-4])):
        assert abs(float((left.double() * right.double()).mean()) * 12) < 5 / math.sqrt(n)


def dither_by_hand(key: int, i: int) -> int:
    """Element i, from single words."""
    upper = int(kernels.philox(key, 1, i // 2)) & 0xFFFFFFFF
    lower = int(kernels.philox(key ^ 0xD1B54A32D192ED03, 1, i // 4)) & 0xFFFFFFFF
    return (upper >> 16 * (i % 2) & 0xFFFF) << 8 | lower >> 8 * (i % 4) & 0xFF


@over(offset=(0, 1, 127, 128, 2**35 - 70), key=(0, 2**64 - 1))
def test_dither_is_half_a_word_and_a_byte(offset: int, key: int) -> None:
    expected = [dither_by_hand(key, i) for i in range(offset, offset + 300)]
    for n in (0, 1, 129, 300):
        first, last = agree(lambda n=n: [kernels.dither24(key, n, at) for at in (offset, offset + 300 - n)])
        assert first.tolist() == expected[:n] and last.tolist() == expected[300 - n :]


def test_dither_rounds_up_as_often_as_it_should() -> None:
    """P(U < T) = T / 2^24 within 5 sigma of 2^20 draws, also where only the lower bits decide."""
    n = 1 << 20
    u = kernels.dither24(7, n)
    assert int(u.min()) >= 0 and int(u.max()) < 1 << 24
    for threshold in (1 << 12, 5_000_001, 1 << 23):
        p = threshold / 2**24
        assert abs(float((u < threshold).double().mean()) - p) < 5 * math.sqrt(p * (1 - p) / n)
    for bits in (u & 255, u >> 16):
        counts = torch.bincount(bits, minlength=256).double()
        assert abs(float(((counts - n / 256) ** 2).sum() / (n / 256)) - 255) < 5 * math.sqrt(510)


def test_negative_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative, got n=-1"):
        kernels.philox(0, -1)


def test_the_dither_of_many_tensors_is_that_of_each() -> None:
    """Streams of every length to the edges of their blocks, and one too long to be made with others."""
    sizes = [0, 1, 7, 8, 9, 15, 16, 17, 40, 100_001, 33, 0, 5]
    keys = [2**64 - 1 - 2**33 * i for i in range(len(sizes))]
    together = agree(lambda: kernels.dithers24(keys, sizes))
    each = agree(lambda: [kernels.dither24(key, n) for key, n in zip(keys, sizes, strict=True)])
    assert torch.equal(together, torch.cat(each))
    assert agree(lambda: [kernels.dithers24([], []).numel(), kernels.dithers24([1], [0]).numel()]) == [0, 0]
    with pytest.raises(ValueError, match="a key and a size"):
        kernels.dithers24([1], [2, 3])
