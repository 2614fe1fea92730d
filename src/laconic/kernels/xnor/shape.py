"""Shape of a convolution of signs."""

from __future__ import annotations

from dataclasses import dataclass

LONGEST = 1 << 22  # entries per product: results are exact float32
Pair = tuple[int, int]


@dataclass(frozen=True)
class ConvShape:
    """Convolution of `images` of (channels, height, width) to `outputs` channels."""

    images: int
    channels: int
    height: int
    width: int
    outputs: int
    taps_y: int
    taps_x: int
    stride_y: int
    stride_x: int
    padding_y: int
    padding_x: int
    dilation_y: int
    dilation_x: int

    def __post_init__(self) -> None:
        for name in (
            "channels",
            "outputs",
            "taps_y",
            "taps_x",
            "stride_y",
            "stride_x",
            "dilation_y",
            "dilation_x",
        ):
            if not 0 < getattr(self, name) < 1 << 31:
                raise ValueError(f"{name} must be from 1 to 2^31 - 1, got {getattr(self, name)}")
        for name in ("padding_y", "padding_x"):
            if not 0 <= getattr(self, name) < 1 << 31:
                raise ValueError(f"{name} must be from 0 to 2^31 - 1, got {getattr(self, name)}")
        if self.entries > LONGEST:
            raise ValueError(
                f"a product has at most {LONGEST} entries, got {self.entries}: cut the channels in groups"
            )
        if self.out_height < 1 or self.out_width < 1:
            raise ValueError(
                f"a kernel of {self.taps_y} x {self.taps_x} with these dilations does not fit into"
                f" {self.height} x {self.width} with padding {self.padding_y, self.padding_x}"
            )

    @property
    def entries(self) -> int:
        return self.channels * self.taps_y * self.taps_x

    @property
    def out_height(self) -> int:
        return (
            self.height + 2 * self.padding_y - self.dilation_y * (self.taps_y - 1) - 1
        ) // self.stride_y + 1

    @property
    def out_width(self) -> int:
        return (
            self.width + 2 * self.padding_x - self.dilation_x * (self.taps_x - 1) - 1
        ) // self.stride_x + 1
