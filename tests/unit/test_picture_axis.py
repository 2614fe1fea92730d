"""Ticks of a picture's axes."""

from __future__ import annotations

import numpy as np
import pytest

from laconic.report.picture import axis


@pytest.mark.parametrize(("low", "high"), [(2.4, 4.5), (1.9, 2.1), (0.3, 0.9), (0.011, 0.019), (3.0, 3.0001)])
def test_a_narrow_logarithmic_axis_has_ticks_too(low: float, high: float) -> None:
    to_pixels, ticks = axis(low, high, 0, 100, log=True)
    assert 3 <= len(ticks) <= 8 and all(low <= tick <= high for tick in ticks)
    assert np.all(np.diff(to_pixels(np.array(ticks))) > 0)


def test_a_wide_logarithmic_axis_has_powers_of_ten() -> None:
    assert axis(0.008, 30, 0, 100, log=True)[1] == pytest.approx([0.01, 0.1, 1, 10])
