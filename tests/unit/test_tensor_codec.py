"""TensorCodec: messages of a codec that knows one tensor at a time, and what the base does for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from tests.unit.shared import for_each, refuses
from torch import Tensor

from laconic.core.codec import Codec
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.core.tensor_codec import TensorCodec

SEGMENTS = Segments((5, 20, 9), (3, 2, 0))
X = torch.arange(24.0) % 7


@dataclass(frozen=True, repr=False)
class Halves(TensorCodec):
    """Float16, as the sketch in CONTRIBUTING has it."""

    unbiased: ClassVar[bool] = False

    def encode_tensor(self, x: Tensor, key: int) -> Tensor:
        return x.half().view(torch.uint8)

    def decode_tensor(self, wire: Tensor, n: int) -> Tensor:
        return wire.view(torch.float16)

    def nbytes(self, n: int) -> int:
        return 2 * n

    def omega(self, n: int) -> float:
        return 2.0**-22


@dataclass(frozen=True, repr=False)
class Shortened(TensorCodec):
    """Whole numbers in 0..255, without the zeros at the end."""

    fixed_size: ClassVar[bool] = False
    unbiased: ClassVar[bool] = True

    def encode_tensor(self, x: Tensor, key: int) -> Tensor:
        return x[: int(x.nonzero().max()) + 1 if x.any() else 0].to(torch.uint8)

    def decode_tensor(self, wire: Tensor, n: int) -> Tensor:
        if wire.numel() > n:
            raise WireError(f"more than {n} numbers")
        return torch.cat([wire, wire.new_zeros(n - wire.numel())])

    def nbytes(self, n: int) -> int:
        return n

    def omega(self, n: int) -> float:
        return 0.0


def message(codec: Codec, segments: Segments = SEGMENTS) -> Tensor:
    return codec.encode_segments(X, segments, range(len(segments)))


@for_each("codec", [Halves(), Shortened()])
def test_a_message_of_one_is_the_wire_and_each_tensor_of_many_decodes_as_if_alone(codec: Codec) -> None:
    assert torch.equal(message(codec, Segments.whole(24)), codec.encode(X))
    out = codec.decode_segments_add_(message(codec), SEGMENTS, torch.zeros(24), 0.5)
    assert [view.tolist() for view in SEGMENTS.views(2 * out)] == [[5, 6, 0], [6, 0], []]
    assert out.count_nonzero() == 3
    assert message(codec, Segments((), ())).numel() == codec.message_nbytes(Segments((), ())) == 0


def test_the_bytes_of_a_message() -> None:
    assert message(Halves()).numel() == Halves().message_nbytes(SEGMENTS) == 10
    assert message(Shortened()).tolist() == [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 5, 6, 6]
    assert Shortened().message_nbytes(SEGMENTS) == 17


def test_damaged_messages_are_refused() -> None:
    class Wide(Halves):
        def decode_tensor(self, wire: Tensor, n: int) -> Tensor:
            return wire

    halves, good = message(Halves()), message(Shortened())
    for bad, words in (
        (halves[:-1], "a wire of 10 bytes is expected, got 9"),
        (torch.cat([halves] * 2), "a wire of 10 bytes is expected, got 20"),
    ):
        for decode in (Halves().decode_segments_add_, Halves().clear_segments_):
            refuses(WireError, words, decode, bad, SEGMENTS, X.clone())
    swollen, negative = good.clone(), good.clone()
    swollen[0], negative[3] = 3, 128
    for bad, words in (
        (good[:11], "the lengths of the wires fill 12 bytes, but 11 are left"),
        (good[:-1], r"wires of \[2, 1, 0\] bytes do not fill 2 bytes"),
        (swollen, r"wires of \[3, 1, 0\] bytes do not fill 3 bytes"),
        (negative, "do not fill 3 bytes"),
        (torch.cat([good, good]), "a wire of at most 17 bytes is expected, got 30"),
    ):
        refuses(WireError, words, Shortened().decode_segments_add_, bad, SEGMENTS, X.clone())
    refuses(WireError, r"24 values are expected, got \(48,\)", Wide().decode, Halves().encode(X), 24)
    out, infinite = X.clone(), halves.clone()
    infinite[-2:] = torch.tensor([torch.inf]).half().view(torch.uint8)
    refuses(WireError, "holds NaN or Inf", Halves().decode_segments_add_, infinite, SEGMENTS, out)
    assert torch.equal(out, X), "refused before the first write"
