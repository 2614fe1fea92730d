"""The report's figures equal those computed by hand, on whole runs and on halves."""

from __future__ import annotations

import io
import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console
from tests.unit.shared import for_each

from laconic.tools.cli.tables import print_summary
from laconic.tools.report import Ledger, publish
from laconic.tools.report.curves import Curve
from laconic.tools.report.figure import Figure
from laconic.tools.report.ledger import EVENTS, read_events
from laconic.tools.report.picture import PANEL_HEIGHT, TOP, axis, panel
from laconic.tools.report.series import read_run
from laconic.tools.report.summary import Row

CONFIG = {
    **{"name": "test", "title": "a <made up> run", "task": "digits"},
    **{"workers": 2, "steps": 4, "batch": 8, "seeds": 2},
    "methods": ["dense()", "small(x='<b>')"],
    "against": ["dense()"],
}
TIMES = ("data_s", "forward_s", "backward_s", "update_s", "encode_s", "communicate_s", "decode_s")


def about(method: str, seed: int, rank: int, step: int) -> dict[str, Any]:
    return {"method": method, "seed": seed, "rank": rank, "step": step}


def step_event(method: str, seed: int, rank: int, step: int) -> dict[str, Any]:
    payload = 1000 if method == "dense()" else 40 if step <= 2 else 20
    sent = dict.fromkeys(("payload_sent", "payload_received"), payload)
    sent |= dict.fromkeys(("network_sent", "network_received"), 2 * payload)
    event = {
        "kind": "step",
        "loss": 1.0 / step + 0.1 * rank + seed,
        "dense": 2000,
        "step_s": 0.01 * (1 + seed),
    }
    return about(method, seed, rank, step) | event | sent | dict.fromkeys(TIMES, 0.001)


def test_event(method: str, seed: int, rank: int, step: int) -> dict[str, Any]:
    right = 9 if seed == 0 else 7
    event = {"kind": "eval", "right": right, "answers": 10, "loss_sum": 5.0}
    return about(method, seed, rank, step) | event


test_event.__test__ = False  # type: ignore[attr-defined]


def write_run(folder: Path, config: dict[str, Any] = CONFIG, until: int = 4) -> None:
    with Ledger(folder, config) as ledger:
        for method in config["methods"]:
            for seed in range(config["seeds"]):
                made = {"optimiser": "SGD" if method == "dense()" else "AdamW", "lr": 0.001}
                ledger.write({"kind": "start", "method": method, "seed": seed, "step": 0, "rank": 0} | made)
                for step in range(1, until + 1):
                    for rank in range(2):
                        ledger.write(step_event(method, seed, rank, step))
                        if step in (2, 4):
                            ledger.write(test_event(method, seed, rank, step))


def test_the_table_is_what_the_events_say(tmp_path: Path) -> None:
    write_run(tmp_path)
    dense, small = publish(tmp_path).rows
    assert (dense.wire_mb, dense.smaller, dense.against_first) == (0.002, 1.0, 1.0)
    assert (small.wire_mb, small.smaller, small.against_first) == pytest.approx((4e-5, 50.0, 50.0))
    # The standard error of two values: (0.9 - 0.7) / 2.
    found = (
        small.total_mb,
        small.payload_mb,
        small.accuracy.mean,
        small.accuracy.error,
        small.test_loss.mean,
    )
    assert found == pytest.approx((240e-6, 2e-5, 0.8, 0.1, 0.5))
    assert (small.train_loss.mean, small.step_s.mean) == pytest.approx((0.25 + 0.05 + 0.5, 0.015))
    assert (dense.optimiser, small.optimiser) == ("SGD 0.001", "AdamW 0.001")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["complete"] and summary["interrupted"] is None
    assert summary["rows"][1]["smaller"] == pytest.approx(50.0)
    path = tmp_path / EVENTS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"start"' not in line))
    assert [row.optimiser for row in publish(tmp_path).rows] == ["", ""], "older events do not say it"
    whole = read_events(tmp_path)
    path.write_text(path.read_text()[:-20])
    assert read_events(tmp_path) == whole[:-1], "a cut last line is left out"


@for_each("width", [80, 100, 160])
def test_the_table_fits_a_terminal_and_cuts_nothing_off(width: int) -> None:
    figure = Figure(0.98123, 0.00234)
    spec = "onebit_adam(warmup_steps=200, codec=sparse(topk(density=0.01), indices=golomb()))"
    row = Row(
        **{"spec": spec, "seeds": 3, "steps": 300, "optimiser": "QRDAAdaGrad 0.01"},
        **dict.fromkeys(("accuracy", "test_loss", "train_loss"), figure),
        **{"payload_mb": 0.015234, "smaller": 1234.5, "wire_mb": 0.020961, "total_mb": 5.0},
        **{"step_s": Figure(0.1231, 0.0101), "against_first": 71.0, "zeros": 0.301},
    )
    screen = Console(width=width, file=io.StringIO(), color_system=None)
    print_summary(screen, [row])
    lines = cast(io.StringIO, screen.file).getvalue().splitlines()
    assert max(map(len, lines)) <= width
    shown = "".join("".join(lines).split())
    cells = ["QRDAAdaGrad0.01", "98.12", "±0.23", "0.981", "0.01523", "1234.5", "0.02096", "123.1", "30.1"]
    if width >= 100:
        assert all(cell in shown for cell in cells)
        assert any("98.12 ± 0.23" in line and "30.1" in line for line in lines)
    assert "…" not in shown


def test_a_report_says_what_masks_leave_in_use(tmp_path: Path) -> None:
    write_run(tmp_path)
    with Ledger(tmp_path, CONFIG) as ledger:
        for seed in range(2):
            for step, density, changed in ((3, 0.1, 0.04), (1, 0.5, 0.2)):  # of a resumed run: out of order
                event = {"kind": "masks", "step": step, "density": density, "changed": changed}
                ledger.write(event | {"method": "dense()", "seed": seed, "rank": 0})
    rows = publish(tmp_path).rows
    assert [(row.density, row.changed) for row in rows] == [(0.1, 0.04), (0.0, 0.0)]
    said = "in use at the end: 10.00 %, of these 4.00 % by the last update, with dense()."
    assert said in (tmp_path / "report.html").read_text()


def test_half_a_run_has_a_report_that_says_so(tmp_path: Path) -> None:
    for name, until in (("half", 1), ("none", 0)):
        write_run(tmp_path / name, until=until)
    published = publish(tmp_path / "half", "Interrupted: after one step.")
    assert math.isnan(published.rows[0].accuracy.mean)
    assert "Interrupted: after one step." in published.report.read_text()
    summary = json.loads((tmp_path / "half" / "summary.json").read_text())
    assert not summary["complete"] and summary["rows"][0]["accuracy"]["mean"] is None
    assert publish(tmp_path / "none", "Interrupted.").rows == []
    write_run(tmp_path / "one", CONFIG | {"seeds": 1})
    assert publish(tmp_path / "one").rows[0].accuracy.text(100) == "90.00", "one seed has no error"


def test_a_resumed_training_replaces_its_events(tmp_path: Path) -> None:
    write_run(tmp_path)
    with Ledger(tmp_path, CONFIG) as ledger:
        ledger.rewrite(lambda event: (event["method"], event["seed"]) != ("dense()", 0) or event["step"] <= 2)
        for rank in range(2):
            ledger.write(step_event("dense()", 0, rank, 3) | {"loss": 99.0})
    dense = read_run(tmp_path).methods[0].seeds[0]
    assert dense.steps.tolist() == [1, 2, 3]
    assert dense["loss"][-1] == 99.0


def test_the_page_asks_nobody_and_the_picture_has_a_line_a_method_and_panel(tmp_path: Path) -> None:
    write_run(tmp_path)
    page = publish(tmp_path).report.read_text()
    own = page[: page.index("<script>")]
    assert "a &lt;made up&gt; run" in own and "<made up>" not in page
    assert not any(word in own for word in ("<b>", "src=", "href=", "@import", "url(", "@@"))
    lines = ET.parse(tmp_path / "loss.svg").getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4
    assert all(len(line.attrib["points"].split()) == 4 for line in lines)


def test_time_to_accuracy_is_the_seconds_of_steps_until_a_test_reaches_it(tmp_path: Path) -> None:
    """Tests after steps 2 and 4: seed 0 has 90 % at once, after 2 steps of 10 ms; seed 1 stays at 70 %."""
    write_run(tmp_path / "low", CONFIG | {"target": 70, "name": "low"})
    published = publish(tmp_path / "low")
    dense, _ = published.rows
    assert (dense.reach_s.mean, dense.reach_s.error) == pytest.approx((0.03, 0.01)), "2 x 10 ms and 2 x 20 ms"
    screen = Console(width=120, file=io.StringIO(), color_system=None)
    print_summary(screen, published.rows, published.target)
    assert isinstance(screen.file, io.StringIO)
    shown = " ".join(screen.file.getvalue().split())
    assert "s to 70 %" in shown and "70 % are reached 1.0 times as fast with" in shown
    drawn = (tmp_path / "low" / "loss.svg").read_text()
    assert "test accuracy, %, by seconds of training" in drawn and ">70 %</text>" in drawn

    write_run(tmp_path / "high", CONFIG | {"target": 80, "name": "high"})
    assert math.isnan(publish(tmp_path / "high").rows[0].reach_s.mean), "not every seed has reached it"
    assert json.loads((tmp_path / "high" / "summary.json").read_text())["rows"][0]["reach_s"]["mean"] is None


def test_scalars_reach_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_run(tmp_path)
    boards = EventAccumulator(str(tmp_path / "tensorboard" / "dense-seed1"))
    boards.Reload()
    losses = boards.Scalars("train/loss")
    assert [scalar.step for scalar in losses] == [1, 2, 3, 4]
    assert losses[1].value == pytest.approx(0.5 + 0.05 + 1)
    assert boards.Scalars("test/accuracy")[-1].value == pytest.approx(0.7)


PIPELINE = {"stages": 2, "replicas": 2, "micro_batches": 4, "schedule": "1f1b", "between": "cgx()"}


def write_pipeline(folder: Path) -> None:
    """Two workers whose first sends activations and the second gradients, three times as many."""
    write_run(folder, CONFIG | {"pipeline": PIPELINE})
    events = read_events(folder)
    for event in events:
        if event["kind"] == "step":
            first, sent = event["rank"] == 0, 1e6 if event["method"] == "dense()" else 0.1e6
            event |= {"activations_sent": sent * first, "gradients_sent": 3 * sent * (not first)}
            event |= {"replicas_sent": 0.5e6, "loss": None if first else event["loss"]}
            event["network_sent"] = sent * (1 if first else 3) + 0.5e6
    (folder / EVENTS).write_text("".join(f"{json.dumps(event)}\n" for event in events))


def test_a_report_of_a_pipeline_splits_the_wire(tmp_path: Path) -> None:
    """By hand, over both workers: 1 + 3 + 1 MB with dense stages, 0.1 + 0.3 + 1 MB with the other."""
    write_pipeline(tmp_path)
    section = publish(tmp_path).report.read_text().partition("Between stages")[2].partition("</section>")[0]
    rows = re.findall(r"<tr><th scope=.row.>.*?</tr>", section)
    parts = [re.findall(r"<td>([^<]*)</td>", row)[:3] for row in rows]
    assert parts == [["1", "3", "1"], ["0.1", "0.3", "1"]]
    wide = [float(found) for found in re.findall(r'class="part"[^>]* width="([0-9.]+)"', section)]
    assert [width / wide[0] for width in wide] == pytest.approx([1, 3, 1, 0.1, 0.3, 1], abs=0.01)


def test_logarithmic_axes_have_ticks() -> None:
    for low, high in ((2.4, 4.5), (1.9, 2.1), (0.3, 0.9), (0.011, 0.019), (3.0, 3.0001)):
        to_pixels, ticks = axis(low, high, 0, 100, log=True)
        assert 3 <= len(ticks) <= 8 and all(low <= tick <= high for tick in ticks), (low, high)
        assert np.all(np.diff(to_pixels(np.array(ticks))) > 0)
    assert axis(0.008, 30, 0, 100, log=True)[1] == pytest.approx([0.01, 0.1, 1, 10])


@for_each("mark", [80.0, 95.0, 100.0])
def test_a_marked_value_is_inside_the_panel_with_its_name(mark: float) -> None:
    curve = Curve(np.array([1.0, 2.0]), np.array([90.0, 97.0]), np.zeros(2))
    drawn = panel([curve], 0, "accuracy", log_x=True, log_y=False, mark=mark)
    (line,) = re.findall(r'class="mark" d="M0 ([\d.]+)h', drawn)
    (name,) = re.findall(rf'y="([\d.]+)">{mark:g} %', drawn)
    assert all(TOP <= float(at) <= TOP + PANEL_HEIGHT for at in (line, name))
