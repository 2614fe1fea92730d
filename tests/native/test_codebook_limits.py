"""Numbers that native code takes from Python are checked before it is called."""

from __future__ import annotations

import pytest
import torch

from laconic import kernels
from laconic.core.layout import Segments

WHOLE, X = Segments.whole(4), torch.ones(4)


@pytest.mark.parametrize("levels", [0, 257, 70000])
def test_levels_of_a_hierarchy(levels: int) -> None:
    with pytest.raises(ValueError, match="levels"):
        kernels.hierarchy_encode(X, WHOLE, levels)
    with pytest.raises(ValueError, match="levels"):
        kernels.hierarchy_add_(torch.zeros(8, dtype=torch.uint8), WHOLE, X.clone(), levels)


@pytest.mark.parametrize("bins", [1, 65537, 140000])
def test_bins_of_a_quantile(bins: int) -> None:
    with pytest.raises(ValueError, match="bins"):
        kernels.quantile_encode(X, WHOLE, bins)
    with pytest.raises(ValueError, match="bins"):
        kernels.quantile_add_(torch.zeros(8, dtype=torch.uint8), WHOLE, X.clone(), bins)


def test_bounds_of_powers() -> None:
    many = torch.linspace(1e-3, 1, 70000)
    with pytest.raises(ValueError, match="levels"):
        kernels.powers_encode(X, WHOLE, many)
    with pytest.raises(ValueError, match="levels"):
        kernels.powers_add_(torch.zeros(8, dtype=torch.uint8), WHOLE, X.clone(), many)


@pytest.mark.parametrize(("size", "k"), [(-5, 3), (5, -3)])
def test_positions_drawn_from_a_negative_size(size: int, k: int) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        kernels.random_indices(torch.tensor([size]), torch.tensor([k]), (7,))
