"""The report's figures equal those computed by hand, on whole runs and on halves."""

from __future__ import annotations

import io
import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from laconic.cli.tables import print_summary
from laconic.report import Ledger, publish
from laconic.report.ledger import EVENTS, read_events
from laconic.report.series import read_run
from laconic.report.summary import Figure, Row

CONFIG = {
    "name": "test",
    "title": "a <made up> run",
    "task": "digits",
    "workers": 2,
    "steps": 4,
    "batch": 8,
    "seeds": 2,
    "methods": ["dense()", "small(x='<b>')"],
    "against": ["dense()"],
}
TIMES = ("data_s", "forward_s", "backward_s", "update_s", "encode_s", "communicate_s", "decode_s")


def step_event(method: str, seed: int, rank: int, step: int) -> dict[str, Any]:
    payload = 1000 if method == "dense()" else 40 if step <= 2 else 20
    return {
        "kind": "step",
        "method": method,
        "seed": seed,
        "rank": rank,
        "step": step,
        "loss": 1.0 / step + 0.1 * rank + seed,
        "payload_sent": payload,
        "payload_received": payload,
        "network_sent": 2 * payload,
        "network_received": 2 * payload,
        "dense": 2000,
        "step_s": 0.01 * (1 + seed),
        **dict.fromkeys(TIMES, 0.001),
    }


def test_event(method: str, seed: int, rank: int, step: int) -> dict[str, Any]:
    right = 9 if seed == 0 else 7
    return {
        "kind": "eval",
        "method": method,
        "seed": seed,
        "rank": rank,
        "step": step,
        "right": right,
        "answers": 10,
        "loss_sum": 5.0,
    }


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
    assert small.total_mb == pytest.approx(240e-6)
    assert small.payload_mb == pytest.approx(2e-5)
    assert small.accuracy.mean == pytest.approx(0.8)
    assert small.accuracy.error == pytest.approx(0.1)  # (0.9 - 0.7) / 2: the standard error of two values
    assert small.test_loss.mean == pytest.approx(0.5)
    assert small.train_loss.mean == pytest.approx(0.25 + 0.05 + 0.5)
    assert small.step_s.mean == pytest.approx(0.015)
    assert (dense.optimiser, small.optimiser) == ("SGD 0.001", "AdamW 0.001")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["complete"] and summary["interrupted"] is None
    assert summary["rows"][1]["smaller"] == pytest.approx(50.0)


def test_a_run_of_older_events_does_not_say_its_optimiser(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = tmp_path / EVENTS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"start"' not in line))
    assert [row.optimiser for row in publish(tmp_path).rows] == ["", ""]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_table_fits_a_terminal_and_cuts_nothing_off(width: int) -> None:
    figure = Figure(0.98123, 0.00234)
    spec = "onebit_adam(warmup_steps=200, codec=sparse(topk(density=0.01), indices=golomb()))"
    row = Row(
        spec=spec,
        seeds=3,
        steps=300,
        accuracy=figure,
        test_loss=figure,
        train_loss=figure,
        payload_mb=0.015234,
        smaller=1234.5,
        wire_mb=0.020961,
        total_mb=5.0,
        step_s=Figure(0.1231, 0.0101),
        against_first=71.0,
        zeros=0.301,
        optimiser="QRDAAdaGrad 0.01",
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
    write_run(tmp_path, until=1)
    published = publish(tmp_path, "Interrupted: after one step.")
    assert math.isnan(published.rows[0].accuracy.mean)
    assert "Interrupted: after one step." in published.report.read_text()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert not summary["complete"] and summary["rows"][0]["accuracy"]["mean"] is None


def test_a_run_without_a_step_has_a_report(tmp_path: Path) -> None:
    write_run(tmp_path, until=0)
    assert publish(tmp_path, "Interrupted.").rows == []


def test_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = tmp_path / EVENTS
    whole = read_events(tmp_path)
    path.write_text(path.read_text()[:-20])
    assert read_events(tmp_path) == whole[:-1]


def test_one_seed_has_no_error(tmp_path: Path) -> None:
    write_run(tmp_path, CONFIG | {"seeds": 1})
    row = publish(tmp_path).rows[0]
    assert row.accuracy.text(100) == "90.00"


def test_a_resumed_training_replaces_its_events(tmp_path: Path) -> None:
    write_run(tmp_path)
    with Ledger(tmp_path, CONFIG) as ledger:
        ledger.rewrite(lambda event: (event["method"], event["seed"]) != ("dense()", 0) or event["step"] <= 2)
        for rank in range(2):
            ledger.write(step_event("dense()", 0, rank, 3) | {"loss": 99.0})
    dense = read_run(tmp_path).methods[0].seeds[0]
    assert dense.steps.tolist() == [1, 2, 3]
    assert dense["loss"][-1] == 99.0


def test_the_page_asks_nobody_and_escapes_what_it_shows(tmp_path: Path) -> None:
    write_run(tmp_path)
    page = publish(tmp_path).report.read_text()
    own = page[: page.index("<script>")]
    assert "a &lt;made up&gt; run" in own and "<made up>" not in page
    assert "<b>" not in own
    assert not any(word in own for word in ("src=", "href=", "@import", "url("))
    assert "@@" not in own


def test_the_picture_is_svg_with_a_line_a_method_and_panel(tmp_path: Path) -> None:
    write_run(tmp_path)
    publish(tmp_path)
    root = ET.parse(tmp_path / "loss.svg").getroot()
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
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
    text = publish(tmp_path).report.read_text()
    section = text[text.index("Between stages") :]
    section = section[: section.index("</section>")]
    rows = re.findall(r"<tr><th scope=.row.>.*?</tr>", section)
    assert [re.findall(r"<td>([^<]*)</td>", row)[:3] for row in rows] == [
        ["1", "3", "1"],
        ["0.1", "0.3", "1"],
    ]
    wide = [float(found) for found in re.findall(r'class="part"[^>]* width="([0-9.]+)"', section)]
    assert [each / wide[0] for each in wide] == pytest.approx([1, 3, 1, 0.1, 0.3, 1], abs=0.01)
