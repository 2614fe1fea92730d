"""Old values of a memory: updates piece by piece, undone to the last bit, beside tensors of other routes."""

from __future__ import annotations

import torch

from laconic import kernels
from laconic.core.layout import Layout, Segments
from laconic.feedback.memory.old_values import PIECE, OldValues, pieces

BUCKET = Layout.of([("a", (3 * PIECE + 5,)), ("bias", (7,)), ("b", (70,)), ("none", (0,)), ("c", (PIECE,))])
PART = BUCKET.named(["a", "b", "none", "c"])
BIAS = slice(BUCKET["bias"].offset, BUCKET["bias"].offset + 7)


def test_an_update_is_undone_wherever_its_gradient_is_not_finite() -> None:
    rng = torch.Generator().manual_seed(0)
    before, given = (torch.randn(BUCKET.numel, generator=rng) for _ in range(2))
    for parked in (False, True):
        for bad in (None, 0, 2 * PIECE + 1, BUCKET["c"].offset):
            memory, other, grad, old = before.clone(), before.clone(), given.clone(), OldValues()
            if bad is not None:
                grad[bad] = torch.nan

            def update(
                segments: Segments,
                places: slice,
                memory: torch.Tensor = memory,
                other: torch.Tensor = other,
                grad: torch.Tensor = grad,
            ) -> bool:
                finite = kernels.accumulate_(memory, grad, segments)
                return kernels.accumulate_(other, grad, segments, scale=2.0) and finite

            finite = old.update_(PART, [memory, other], update, [grad if parked else None, None], grad)
            assert finite == (bad is None), (parked, bad)
            assert torch.equal(memory[BIAS], before[BIAS]) and torch.equal(grad[BIAS], given[BIAS])
            for name in PART.names if finite else ():
                at = slice(PART[name].offset, PART[name].offset + PART[name].numel)
                assert torch.equal(memory[at], before[at] + given[at]), (parked, name)
            assert bad is None or bool(grad[bad].isnan()), "so that its tensor can be named"
            old.restore(PART)
            assert torch.equal(memory, before) and torch.equal(other, before), (parked, bad)


def test_pieces_cover_all_elements_in_order() -> None:
    for sizes in ((), (0,), (3,), (5, 5, 5), (4, 11, 0, 2), (10, 1)):
        segments = Segments.consecutive(sizes)
        found = pieces(segments, 5)
        elements = [at for piece, _ in found for start, size in piece for at in range(start, start + size)]
        assert elements == [*range(sum(sizes))], sizes
        assert all(piece.numel <= 5 for piece, _ in found), sizes
        assert all(len(piece) == len(sizes[places]) for piece, places in found), sizes
