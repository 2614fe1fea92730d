"""Level codings: signed levels of a quantiser, most of them zero, in fewer bytes.

A message of s tensors with K nonzero levels, k_i in tensor i, consists of

    counts k_i   uint32 (s,)
    positions, signs and magnitudes, in either coding
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from laconic import kernels
from laconic.core.errors import WireError
from laconic.core.framing import counts_bytes, read_bytes, read_counts, read_positions, sent_to, unsigned
from laconic.core.layout import Segments


class LevelCoding(ABC):
    """Lossless coding of levels int32 (N,) of |level| <= most as bytes."""

    @abstractmethod
    def encode(self, levels: Tensor, segments: Segments, most: int) -> Tensor:
        """Encode levels int32 (N,) as a wire uint8 (m,)."""

    @abstractmethod
    def decode(self, wire: Tensor, segments: Segments, most: int) -> Tensor:
        """Decode levels int32 (N,). Raises `WireError` for an invalid wire."""

    @abstractmethod
    def nbytes(self, n: int, most: int) -> int:
        """Return the most bytes that a tensor of n levels adds to a message."""


class Rice(LevelCoding):
    """Golomb-Rice positions (see `golomb`), packed signs, and magnitudes as a second set of positions.

        positions    uint32 m, then uint8 (m,)
        signs        1 bit each, 1 is negative: ceil(K / 8) bytes
        sums         uint32, of the magnitudes in each tensor with k_i > 0
        magnitudes   Golomb-Rice code of their running sums less one: k_i ascending positions below the sum

    One level has neither sums nor magnitudes. If k_i magnitudes could sum to 2^31, they are cut into pieces,
    with a sum each.
    """

    def encode(self, levels: Tensor, segments: Segments, most: int) -> Tensor:
        indices, counts, magnitudes, signs = kernels.split_levels(levels, segments)
        positions = kernels.rice_encode(indices, counts, segments)
        length = counts_bytes(torch.tensor([positions.numel()], dtype=torch.int64, device="cpu"))
        parts = [counts_bytes(counts), length, positions, signs]
        if most > 1:
            pieces = _pieces(counts, most)
            places, sums = kernels.places_of(magnitudes, pieces)
            parts += [
                counts_bytes(sums),
                kernels.rice_encode(places, pieces, Segments.consecutive(sums.tolist())),
            ]
        return torch.cat(
            [part if part.device == levels.device else sent_to(part, levels.device) for part in parts]
        )

    def decode(self, wire: Tensor, segments: Segments, most: int) -> Tensor:
        counts, rest = read_counts(wire, segments)
        positions, rest = read_positions(rest)
        indices = kernels.rice_decode(positions, counts, segments)
        signs, rest = read_bytes(rest, (indices.numel() + 7) // 8, "the signs")
        magnitudes = torch.ones_like(indices)
        if most > 1:
            pieces = _pieces(counts, most)
            head, rest = read_bytes(rest, 4 * pieces.numel(), "the sums of the magnitudes")
            magnitudes = _magnitudes(rest, pieces, unsigned(head), most)
        elif rest.numel():
            raise WireError("the wire continues after the last sign")
        return kernels.join_levels(indices, counts, magnitudes, signs, segments, most)

    def nbytes(self, n: int, most: int) -> int:
        """Bound a magnitude by r + 1 + 320/154 bits."""
        flat = 8 + kernels.rice_bound(n, n) + (n + 7) // 8
        if most == 1:
            return flat
        pieces, low = -(-n // (kernels.FURTHEST // most)), kernels.rice_parameter(1, most)
        return flat + 6 * pieces + (n * (low + 1) + 320 * n // 154 + 7) // 8


class Elias(LevelCoding):
    """Elias omega codes of gaps and magnitudes, as in the QSGD paper.

    signs    1 bit each, 1 is negative: ceil(K / 8) bytes
    codes    one stream: the K gaps, each from the last position, the first from -1 of its tensor; then the K
             magnitudes
    """

    def encode(self, levels: Tensor, segments: Segments, most: int) -> Tensor:
        indices, counts, magnitudes, signs = kernels.split_levels(levels, segments)
        codes = kernels.elias_encode(torch.cat([kernels.steps_of(indices, counts), magnitudes]))
        return torch.cat([sent_to(counts_bytes(counts), levels.device), signs, codes])

    def decode(self, wire: Tensor, segments: Segments, most: int) -> Tensor:
        counts, rest = read_counts(wire, segments)
        total = int(counts.sum())
        signs, rest = read_bytes(rest, (total + 7) // 8, "the signs")
        codes = kernels.elias_decode(rest, 2 * total)
        indices, _ = kernels.places_of(codes[:total], counts)
        if not kernels.ascending(indices, counts, segments):
            raise WireError("a position lies outside its tensor")
        return kernels.join_levels(indices, counts, codes[total:], signs, segments, most)

    def nbytes(self, n: int, most: int) -> int:
        """Bound a gap g by 1.5 g bits, reached at 2 and 4; gaps add up to n at most."""
        magnitude = kernels.elias_length(most)  # lengths do not fall as values grow
        return 4 + (n + 7) // 8 + (3 * n // 2 + n * magnitude + 7) // 8


CODINGS: dict[str, LevelCoding] = {"rice": Rice(), "elias": Elias()}


def _pieces(counts: Tensor, most: int) -> Tensor:
    """Return the number of magnitudes of each sum, never 0."""
    longest = kernels.FURTHEST // most
    if not counts.numel() or int(counts.max()) <= longest:
        return counts[counts > 0]
    cut = [min(longest, k - at) for k in counts.tolist() for at in range(0, k, longest)]
    return torch.tensor(cut, dtype=torch.int64, device="cpu")


def _magnitudes(wire: Tensor, pieces: Tensor, sums: Tensor, most: int) -> Tensor:
    if bool(((sums < pieces) | (sums > pieces * most)).any()):
        raise WireError(f"a sum of magnitudes lies outside 1..{most} times their number")
    places = kernels.rice_decode(wire, pieces, Segments.consecutive(sums.tolist()))
    magnitudes = kernels.steps_of(places, pieces)
    if not torch.equal(kernels.places_of(magnitudes, pieces)[1], sums):
        raise WireError("the magnitudes do not add up to their sum")
    return magnitudes
