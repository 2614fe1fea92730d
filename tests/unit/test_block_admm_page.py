"""The page of blocks says what was measured, and whether it is what was aimed at."""

from __future__ import annotations

import base64
import re
import zlib
from typing import Any

from benchmarks.block_admm import SEEDS, VARIANTS
from benchmarks.pages.block_admm import NAMES, mosaic, png, written


def run(name: str, error: float, seed: int = 0, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "spec": VARIANTS[name].spec, "seed": seed, "error": error}
    found |= {"cpu_s": 10.0, "moved": 0.0, "machine": {"cores": 2}}
    if VARIANTS[name].spec:
        curve = {"primal": [0.5, 0.25], "dual": [0.5, 0.125]}
        spans = [[("forward", 0.0, 0.1), ("update", 0.1, 0.3)]] * 3
        found |= {"residuals": {"1 to 2": curve, "2 to 3": curve}, "overlap": [1.0, 0.75, 0.5]}
        found |= {"spans": spans, "sent_kb": 100.0, "moved": 3.0}
    return found | more


def test_every_variant_has_a_name() -> None:
    assert NAMES.keys() | {"time line"} == VARIANTS.keys()


def test_a_row_is_a_mean_over_seeds_and_the_bar_is_told() -> None:
    found = [run("blocks", 2.0), run("blocks", 3.0, seed=1), run("sgd", 1.5)]
    page = written([*found, run("time line", 9.0, batch=512)])
    assert f"4 of {len(SEEDS) * len(VARIANTS)} are" in page
    assert "| blocks | `block_admm(blocks=3)` | 2.50 ± 0.71 | 100 | 10 | 2 |" in page
    assert "stay below 4 %: 3.00 % at most." in page and "missed" not in page
    assert "two or more do in 75 %, all 3 in 50 %" in page
    assert "| blocks | 1 to 2 | 0.500 | 0.250 | 0.500 | 0.125 |" in page
    assert "DeepFacto's parts" not in page
    assert "which is missed" in written([run("blocks", 4.5)])


def test_signs_and_parts_are_told_where_they_were_measured() -> None:
    page = written([run("signs, adam", 20.0), run("signs, blocks", 6.0)])
    assert "weights by 0, as a step has the gradient 0, and trains the last layer alone: 20.00 %" in page
    assert "Blocks move them by 3.0, to 6.00 %." in page
    facto = {"reconstruction": 0.1, "least_part": 0.0, "least_code": 1e-9, "code_zeros": 0.25}
    page = written([run("deep_facto", 3.0, **facto)])
    assert "lose 10.00 % of the first block's" in page and "least entry is 0." in page and "25 % are" in page


def test_an_image_has_its_pixels() -> None:
    pixels = bytes(range(256)) * 3 + bytes(16)
    picture = mosaic([pixels.hex()] * 9)
    assert picture.count("<image") == 9
    (first, *_) = re.findall(r"base64,([^\"]+)", picture)
    assert base64.b64decode(first) == png(pixels)
    at = png(pixels).index(b"IDAT")
    lines = zlib.decompress(png(pixels)[at + 4 : -16])
    assert b"".join(lines[i + 1 : i + 29] for i in range(0, 29 * 28, 29)) == pixels
