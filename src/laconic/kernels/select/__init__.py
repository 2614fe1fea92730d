"""Selection of entries: the largest, those above a threshold, or random ones.

All return indices int32 (K,), ascending from the start of each segment, and counts int64 (s,). Zeros and NaN
are never chosen by value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.core.framing import sent_to
from laconic.core.layout import Segments
from laconic.core.selector import Padded
from laconic.kernels import checks, dispatch
from laconic.kernels.select import reference
from laconic.kernels.select.sample import dgc_sampling, exact_sampling, sample_offsets, sampling

MOST_PADDED = 1 << 17  # without synchronisation


def _room(ks: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    most = int(torch.minimum(ks, sizes).clamp_(min=0).sum())
    return torch.empty(most, dtype=torch.int32, device="cpu"), torch.empty(
        ks.numel(), dtype=torch.int64, device="cpu"
    )


def topk(x: Tensor, segments: Segments, ks: Tensor) -> tuple[Tensor, Tensor]:
    """Select the ks[i] largest |x| of each segment, exactly; the lower index first among equals.

    >>> x, halves = torch.tensor([1.0, -3.0, 0.0, 2.0]), Segments((0, 2), (2, 2))
    >>> indices, counts = topk(x, halves, torch.tensor([1, 2]))
    >>> indices.tolist(), counts.tolist()
    ([1, 1], [1, 1])
    """
    checks.addressable(segments.sizes)
    checks.buffer("x", x, segments)
    checks.per_segment("ks", ks, segments)
    if (native := dispatch.native(x)) is not None:
        indices, counts = _room(ks, segments.sizes_tensor)
        k = native.topk(x, segments, ks, indices, counts)
        return indices[:k], counts
    plan = exact_sampling(segments.sizes, tuple(ks.tolist()))
    if dispatch.gpu(x):
        from laconic.kernels.select import gpu

        return gpu.topk(x, segments, plan)
    return reference.topk(x, segments, plan)


def sampled_topk(
    x: Tensor,
    segments: Segments,
    ks: Tensor,
    density: float,
    sample_ratio: float,
    keys: Sequence[int],
    lower: float = 0.8,
    rounds: int = 10,
) -> tuple[Tensor, Tensor]:
    """Select as DGC does: threshold from a sample, lowered until enough pass, then top-k among these.

    The sample is strided, from a random start by the segment's key. The threshold t is the ceil(m *
    density)-th largest of m sampled |x|. While fewer than lower * k pass, t *= lower, at most `rounds` times;
    then the selection is exact, as in segments of at most ceil(2 / density) elements. The k largest that pass
    are the exact top k.
    """
    checks.addressable(segments.sizes)
    checks.buffer("x", x, segments)
    checks.per_segment("ks", ks, segments)
    bits = checks.keys64(keys, len(segments))
    if (native := dispatch.native(x)) is not None:
        plan = sampling(segments.sizes, density, sample_ratio)
        indices, counts = _room(ks, segments.sizes_tensor)
        k = native.sampled_topk(x, segments, ks, *plan, bits, lower, rounds, indices, counts)
        return indices[:k], counts
    samples = dgc_sampling(segments.sizes, tuple(ks.tolist()), density, sample_ratio, lower, rounds)
    if dispatch.gpu(x):
        from laconic.kernels.select import gpu

        return gpu.sampled_topk(x, segments, samples, bits, lower)
    offsets = sample_offsets(samples, bits)
    return reference.sampled_topk(x, segments, samples, offsets, lower)


def padded_topk(
    x: Tensor,
    segments: Segments,
    ks: Tensor,
    density: float,
    sample_ratio: float,
    keys: Sequence[int],
    lower: float = 0.8,
    rounds: int = 10,
) -> Padded | None:
    """Select as `sampled_topk` and leave the counts on the GPU.

    Returns None without a kernel, and for more than `MOST_PADDED` entries.
    """
    if not dispatch.gpu(x) or not segments.numel or ks.numpy().sum() > MOST_PADDED:
        return None
    from laconic.kernels.select import gpu

    checks.addressable(segments.sizes)
    checks.buffer("x", x, segments)
    bits = checks.keys64(keys, len(segments))
    samples = dgc_sampling(segments.sizes, tuple(ks.tolist()), density, sample_ratio, lower, rounds)
    return gpu.padded(x, segments, samples, sent_to(bits, x.device), lower)


def above(x: Tensor, segments: Segments, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Select every nonzero entry with |x| >= threshold[i], float32 (s,).

    >>> indices, _ = above(torch.tensor([1.0, -3.0, 0.0]), Segments.whole(3), torch.tensor([1.0]))
    >>> indices.tolist()
    [0, 1]
    """
    checks.addressable(segments.sizes)
    checks.buffer("x", x, segments)
    checks.per_segment("threshold", threshold, segments, torch.float32)
    if not bool((threshold >= 0).all()):
        raise ValueError(f"a threshold must not be negative or NaN, got {threshold.min().item()}")
    if dispatch.gpu(x):
        from laconic.kernels.select import gpu

        return gpu.above(x, segments, threshold)
    if (native := dispatch.native(x)) is None:
        return reference.above(x, segments, threshold)
    counts = torch.empty(len(segments), dtype=torch.int64, device="cpu")
    indices = torch.empty(segments.numel // 16 + 64, dtype=torch.int32, device="cpu")
    while True:
        k = native.above(x, segments, threshold, indices, counts)
        if k <= indices.numel():
            return indices[:k], counts
        indices = torch.empty(k, dtype=torch.int32, device="cpu")  # room for all


def random_indices(sizes: Tensor, ks: Tensor, keys: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Draw ks[i] distinct positions of [0, sizes[i]), ascending, from the key alone.

    >>> indices, counts = random_indices(torch.tensor([100]), torch.tensor([3]), (7,))
    >>> indices.tolist() == sorted(set(indices.tolist())), counts.tolist()
    (True, [3])
    """
    checks.flat("sizes", sizes, torch.int64)
    checks.flat("ks", ks, torch.int64)
    bits = checks.keys64(keys, sizes.numel())
    if ks.numel() != sizes.numel():
        raise ValueError(f"one k a size is needed ({sizes.numel()}), got {ks.numel()}")
    checks.addressable(sizes.tolist())
    if bool(((ks < 0) | (sizes < 0)).any()):
        raise ValueError(f"ks and sizes are 0 or more, got {ks.tolist()[:4]} of {sizes.tolist()[:4]}")
    if (native := dispatch.native(sizes)) is not None:
        indices, counts = _room(ks, sizes)
        native.random_indices(sizes, ks, bits, indices, counts)
        return indices, counts
    return reference.random_indices(sizes, ks, bits)
