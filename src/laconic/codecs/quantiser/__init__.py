"""Quantiser: base of codecs that send each element as one of a few levels of a scale."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from laconic import kernels
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.layout import Segments
from laconic.core.message_runs import add_runs_
from laconic.kernels.quantise.form import Form, Measure

FARTHEST = 1e5  # standard deviations: no entry of 2^31 is farther out than 46,341


class Quantiser(Codec):
    """Wire of n elements in blocks of B (0: the whole tensor) with s levels:

        scales   float32 (ceil(n / B),)
        codes    [sign 1 | level] in b = 1 + bit_length(s) bits each, low bits first, padded to a byte;
                 packing='base3': five per byte

    4 ceil(n / B) + ceil(n b / 8) bytes, or + ceil(n / 5). An element is rounded at random, without bias, to a
    level next to |x| / scale. NaN and Inf raise `NonFiniteError`.
    """

    @property
    @abstractmethod
    def form(self) -> Form:
        """Levels, blocks and packing of the wire. Raises `ValueError` for impossible options."""

    @abstractmethod
    def measures(self, x: Tensor, segments: Segments) -> Measure:
        """Return how the blocks of x are scaled."""

    @cached_property
    def _form(self) -> Form:
        return self.form

    def __post_init__(self) -> None:
        try:
            _ = self._form
        except ValueError as error:
            raise SpecError(f"{self.name}: {error}") from None

    @property
    def concatenates(self) -> bool:
        return self.fixed_size

    def nbytes(self, n: int) -> int:
        form = self._form
        return 4 * form.blocks_in(n) + form.codes_nbytes(n)

    def encode_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> Tensor:
        return kernels.quantise(x, segments, keys, self._form, self.measures(x, segments))

    def decode_segments_add_(self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1) -> Tensor:
        return kernels.dequantise_add_(wire, segments, out, self._form, alpha)

    def decode_messages_add_(
        self, messages: Sequence[tuple[Tensor, Segments]], out: Tensor, alpha: float = 1
    ) -> Tensor:
        if not self.fixed_size:
            return super().decode_messages_add_(messages, out, alpha)
        add = kernels.dequantise_messages_add_
        add_runs_(self, messages, lambda wires, segments: add(wires, segments, out, self._form, alpha))
        return out


def check_norm(name: str, norm: str) -> None:
    arguments.choice(f"{name}: norm", norm, ("max", "l2"))


def check_clip(name: str, clip: float) -> None:
    hint = "in standard deviations of a tensor; 0 cuts nothing off"
    arguments.number(f"{name}: clip", clip, least=0, most=FARTHEST, hint=hint)


def longest(n: int, block: int) -> int:
    return min(n, block) if block else n
