"""Numbers that native code takes from Python are checked before it is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from laconic import kernels
from laconic.core.layout import Segments

WHOLE, WIRE = Segments.whole(4), torch.zeros(8, dtype=torch.uint8)
BOUNDS = torch.linspace(1e-3, 1, 70000)


@pytest.mark.parametrize(
    ("kind", "name", "number"),
    [
        *(("hierarchy", "levels", levels) for levels in (0, 257, 70000)),
        *(("quantile", "bins", bins) for bins in (1, 65537, 140000)),
        ("powers", "levels", BOUNDS),
    ],
    ids=lambda each: "70000 bounds" if isinstance(each, torch.Tensor) else str(each),
)
def test_numbers_beyond_a_codebook_are_refused(kind: str, name: str, number: Any) -> None:
    with pytest.raises(ValueError, match=name):
        getattr(kernels, f"{kind}_encode")(torch.ones(4), WHOLE, number)
    with pytest.raises(ValueError, match=name):
        getattr(kernels, f"{kind}_add_")(WIRE, WHOLE, torch.ones(4), number)


@pytest.mark.parametrize(("size", "k"), [(-5, 3), (5, -3)])
def test_positions_drawn_from_a_negative_size(size: int, k: int) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        kernels.random_indices(torch.tensor([size]), torch.tensor([k]), (7,))
