"""Blocks side by side in `laconic train`: options that do not fit, and the report's section."""

from __future__ import annotations

import re

import pytest
from tests.unit.shared import for_each
from typer.testing import CliRunner

from laconic.tools.cli.main import app
from laconic.tools.report.side_by_side import read_blocks, side_by_side
from laconic.tools.report.time_line import at_once

ONLINE = "block_admm(blocks=3)"
MLP = ["--model", "mlp", "--workers"]
REFUSED = {
    "workers": ([*MLP, "2"], "needs --workers 3, got 2"),
    "bits": ([*MLP, "3", "--bits", "8"], r"--bits and --with block_admm\(...\) cannot"),
    "skew": ([*MLP, "3", "--skew", "1"], r"--skew and --with block_admm\(...\) cannot"),
    "deep": ([*MLP, "9", "--with", "block_admm(blocks=9)"], "at most 3, the number of children"),
}


@for_each("case", REFUSED)
def test_options_that_do_not_fit_blocks_are_refused(case, tmp_path):
    options, message = REFUSED[case]
    given = options if "--with" in options else ["--with", ONLINE, *options]
    done = CliRunner().invoke(app, ["train", "digits", "--out", str(tmp_path), *given])
    assert done.exit_code != 0
    assert re.search(message, f"{done.output}{done.exception}")


def test_the_report_tells_how_much_blocks_overlap():
    """Three blocks of two steps: alone, then two at once, then all."""
    spans = [[[0.0, 2.0], [4.0, 5.0]], [[1.0, 2.0], [4.0, 5.0]], [[2.0, 2.5], [4.0, 5.0]]]
    steps = {
        step + 1: [
            {"rank": rank, "blocks": {"primal": 0.5 / (step + 1), "dual": 0.1, "activations_sent": 2e6,
                                      "targets_sent": 1e6, "spans": [["update", *spans[rank][step]]]}}
            for rank in range(3)
        ]
        for step in range(2)
    }  # fmt: skip
    series = read_blocks(steps)
    assert at_once(series.spans(0, 2)) == pytest.approx([1.0, 2 / 3.5, 1 / 3.5])
    page = side_by_side([(ONLINE, series), ("dense()", None)])
    assert "two or more do in 100 %, all 3 in 100 %" in page  # of the second half of the steps
    assert page.count("<rect") == 2 + 3 and "0.5 to 0.25" in page and "<td>2</td><td>1</td>" in page
    assert side_by_side([("dense()", None)]) == ""
