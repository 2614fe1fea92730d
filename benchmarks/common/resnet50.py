"""The sizes of the 161 parameter tensors of ResNet-50 (He et al. 2015, arXiv:1512.03385), as in torchvision.

>>> len(SIZES), sum(SIZES)
(161, 25557032)
"""

from __future__ import annotations

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # width, blocks
EXPANSION = 4


def _sizes() -> list[int]:
    sizes = [7 * 7 * 3 * 64, 64, 64]  # first convolution, and scale and shift of its normalisation
    channels = 64
    for width, blocks in STAGES:
        for block in range(blocks):
            wide = EXPANSION * width
            sizes += [
                channels * width,
                width,
                width,
                9 * width * width,
                width,
                width,
                width * wide,
                wide,
                wide,
            ]
            if block == 0:
                sizes += [channels * wide, wide, wide]
            channels = wide
    return [*sizes, channels * 1000, 1000]


SIZES = _sizes()
