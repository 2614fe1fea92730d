"""`laconic demo` on real emulated links: its table, and that nothing is left of it, also after Ctrl-C."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laconic.tools.lab import missing
from laconic.tools.report.ledger import EVENTS
from tests.dist.commands import LACONIC, interrupt, laconic, mentions, soon, start, wait_for

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no lab here: {missing()}")


def nothing_is_left_of(folder: Path) -> bool:
    """Whether all processes that have this folder in their command line end soon."""

    def gone() -> bool:
        processes = (each.name for each in Path("/proc").glob("[0-9]*"))
        return not any(mentions("cmdline", int(pid), str(folder)) for pid in processes)

    return soon(gone)


def test_the_demo_trains_over_emulated_links_and_leaves_none(tmp_path: Path) -> None:
    code, said, complaints = laconic("demo", "--out", tmp_path, "--steps", 2)
    assert code == 0, complaints
    assert "an emulated link of 100 Mbit/s" in said and "s to 96 %" in said
    rows = {row["spec"]: row for row in json.loads((tmp_path / "demo" / "summary.json").read_text())["rows"]}
    assert list(rows) == ["dense()", "fp16()", "auto()", "stc(density=0.01)"]
    sent_s = rows["dense()"]["wire_mb"] * 8 / 100
    assert rows["dense()"]["step_s"]["mean"] > 0.9 * sent_s > 1, "as slow as 100 Mbit/s are"
    assert rows["dense()"]["counted_mb"] > rows["stc(density=0.01)"]["counted_mb"] > 0
    assert nothing_is_left_of(tmp_path)


@pytest.mark.nightly
def test_ctrl_c_ends_the_demo_cleanly(tmp_path: Path) -> None:
    demo = start(*LACONIC, "demo", "--out", tmp_path)
    events = tmp_path / "demo" / EVENTS
    wait_for(lambda: events.exists() and events.stat().st_size, demo)
    code, said, complaints = interrupt(demo)
    assert code == 130, complaints
    assert "Interrupted" in said and "Traceback" not in complaints
    assert nothing_is_left_of(tmp_path)
