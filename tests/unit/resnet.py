"""The shapes of ResNet-50 (He et al. 2015): 161 tensors, 25.6 million elements."""

from __future__ import annotations

from laconic.core.layout import Layout


def resnet50() -> Layout:
    """Names and shapes, from the first convolution to the last bias."""
    tensors: list[tuple[str, tuple[int, ...]]] = []

    def conv(name: str, out: int, inside: int, k: int) -> None:
        tensors.append((f"{name}.weight", (out, inside, k, k)))
        tensors.extend((f"{name}.norm.{kind}", (out,)) for kind in ("weight", "bias"))

    conv("stem", 64, 3, 7)
    inside = 64
    for stage, (width, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(depth):
            at = f"{stage}.{block}"
            conv(f"{at}.1", width, inside, 1)
            conv(f"{at}.2", width, width, 3)
            conv(f"{at}.3", 4 * width, width, 1)
            if block == 0:
                conv(f"{at}.shortcut", 4 * width, inside, 1)
            inside = 4 * width
    tensors += [("fc.weight", (1000, 2048)), ("fc.bias", (1000,))]
    return Layout.of(tensors)
