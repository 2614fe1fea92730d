"""Ticks of a picture's axes."""

from __future__ import annotations

import re

import numpy as np
import pytest

from laconic.report.curves import Curve
from laconic.report.picture import PANEL_HEIGHT, TOP, axis, panel


@pytest.mark.parametrize(("low", "high"), [(2.4, 4.5), (1.9, 2.1), (0.3, 0.9), (0.011, 0.019), (3.0, 3.0001)])
def test_a_narrow_logarithmic_axis_has_ticks_too(low: float, high: float) -> None:
    to_pixels, ticks = axis(low, high, 0, 100, log=True)
    assert 3 <= len(ticks) <= 8 and all(low <= tick <= high for tick in ticks)
    assert np.all(np.diff(to_pixels(np.array(ticks))) > 0)


def test_a_wide_logarithmic_axis_has_powers_of_ten() -> None:
    assert axis(0.008, 30, 0, 100, log=True)[1] == pytest.approx([0.01, 0.1, 1, 10])


@pytest.mark.parametrize("mark", [80.0, 95.0, 100.0])
def test_a_marked_value_is_inside_the_panel_with_its_name(mark: float) -> None:
    curve = Curve(np.array([1.0, 2.0]), np.array([90.0, 97.0]), np.zeros(2))
    drawn = panel([curve], 0, "accuracy", log_x=True, log_y=False, mark=mark)
    (line,) = re.findall(r'class="mark" d="M0 ([\d.]+)h', drawn)
    (name,) = re.findall(rf'y="([\d.]+)">{mark:g} %', drawn)
    assert all(TOP <= float(at) <= TOP + PANEL_HEIGHT for at in (line, name))
