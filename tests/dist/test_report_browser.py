"""The report in a real browser: every plot is drawn, and the table is there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from laconic.tools.report import publish
from laconic.tools.report.ledger import EVENTS, read_events

from ..unit.test_report_summary import CONFIG, write_pipeline, write_run
from ..unit.test_report_together import GOSSIP, LOCAL, write

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=8000",
)
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(BROWSER is None, reason="no chromium here: apt-get install chromium"),
]


def browse(page: Path, profile: Path, *options: str) -> str:
    assert BROWSER is not None
    command = [BROWSER, *QUIET, f"--user-data-dir={profile}", *options, page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    return publish(folder).report.resolve()


def test_a_browser_draws_every_plot_and_the_table(page: Path, tmp_path: Path) -> None:
    dom = browse(page, tmp_path / "profile", "--dump-dom")
    body = dom[: dom.index("<script>")]
    for plot in ("loss_by_megabyte", "loss_by_step", "accuracy_by_step"):
        drawn = body[body.index(f'id="{plot}"') :]
        drawn = drawn[: drawn.index("</figure>")]
        lines = re.findall(r'class="js-line"[^>]* d="M[^"]+L[^"]+"', drawn)
        assert len(lines) >= 2, f"{plot}: {len(lines)} lines are drawn"
    phases = body[body.index('id="phases"') :]
    assert (
        len(re.findall(r'<g class="point"', phases[: phases.index("</figure>")])) == 12
    )  # 2 methods, 3 + 3 bars
    rows = re.findall(r"<tr>.*?</tr>", body[body.index("<tbody>") : body.index("</tbody>")])
    assert len(rows) == 2
    assert "50.0 ×" in rows[1]  # noqa: RUF001
    assert "rgb(" in rows[0], "the script has coloured the table"


def test_a_browser_paints_the_page(page: Path, tmp_path: Path) -> None:
    from PIL import Image

    picture = tmp_path / "page.png"
    browse(page, tmp_path / "profile", f"--screenshot={picture}", "--window-size=1240,1400")
    with Image.open(picture) as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or []}
    assert {(59, 111, 182), (194, 87, 26)} <= colours  # both methods' lines


def test_the_table_of_seven_methods_fits_1100_columns_and_breaks_no_word(tmp_path: Path) -> None:
    long = ["dgc(density=0.01, warmup_steps=100)", "cgx(bits=8, rounding='stochastic', pattern='tree')"]
    methods = ["dense()", "fp16()", "auto()", "cgx()", "oktopk(density=0.01)", *long]
    write_run(tmp_path, CONFIG | {"methods": methods, "target": 70})
    page = publish(tmp_path).report.resolve()
    asked = """
        const room = document.querySelector("table").parentElement;
        const broken = [...document.querySelectorAll("tbody code")].filter((code) =>
          [...code.childNodes].some((part) => {
            const range = document.createRange(); range.selectNodeContents(part);
            return part.nodeType === 3 && range.getClientRects().length > 1; }));
        const names_shown = document.getElementById("legend").children.length;
        const over = room.scrollWidth - room.clientWidth;
        document.title = `over ${over} broken ${broken.length} legend ${names_shown}`;
    """
    before, end, after = page.read_text().rpartition("</body>")
    page.write_text(f"{before}<script>{asked}</script>{end}{after}")
    dom = browse(page, tmp_path / "profile", "--dump-dom", "--window-size=1100,1400")
    (title,) = re.findall(r"<title>(over .*?)</title>", dom)
    assert title == "over 0 broken 0 legend 7"
    assert "s to 70 %" in dom and "vs. baseline" not in dom[: dom.index("<tbody>")]


def test_a_browser_draws_how_replicas_stay_together(tmp_path: Path) -> None:
    page = publish(write(tmp_path / "run", "dense()", LOCAL, GOSSIP)).report.resolve()
    dom = browse(page, tmp_path / "profile", "--dump-dom")
    body = dom[: dom.index("<script>")]
    distances, matrix = (body[body.index(f'id="{plot}"') :] for plot in ("consensus_by_step", "talk2"))
    lines = re.findall(r'class="js-line"[^>]* d="M[^"]+"', distances[: distances.index("</figure>")])
    assert len(lines) >= 2, "of both strategies"
    matrix = matrix[: matrix.index("</figure>")]
    assert '<g class="hm">' in matrix and "<image" in matrix
    assert re.findall(r'class="heatmap-label"[^>]*>.*?(\d+)<', matrix) == ["4", "4"]


def test_a_browser_draws_the_trace_of_a_loss_scale(tmp_path: Path) -> None:
    write_run(tmp_path)
    events = read_events(tmp_path)
    for event in events:
        if event["kind"] == "step":
            event |= {"loss_scale": 65536.0 if event["step"] <= 2 else 32768.0, "skipped": event["step"] == 2}
    (tmp_path / EVENTS).write_text("".join(f"{json.dumps(event)}\n" for event in events))
    dom = browse(publish(tmp_path).report.resolve(), tmp_path / "profile", "--dump-dom")
    body = dom[: dom.index("<script>")]
    assert "1 of 4 steps skipped, scale 32768 at the last step" in body
    drawn = body[body.index('id="scale_by_step"') :]
    drawn = drawn[: drawn.index("</figure>")]
    assert len(re.findall(r'class="js-line"[^>]* d="M[^"]+L[^"]+"', drawn)) >= 2
    assert re.findall(r">2[^0-9]*<tspan[^>]*>16<", drawn), "ticks are powers of two"


def test_a_browser_draws_what_a_pipeline_sends(tmp_path: Path) -> None:
    """Bars as long as the table says, and its figures under their heads."""
    write_pipeline(tmp_path)
    page = publish(tmp_path).report.resolve()
    asked = """
        const drawn_parts = [...document.querySelectorAll(".wireparts .part")];
        const wide = drawn_parts.map((bar) => bar.getBoundingClientRect().width);
        const cells = [...document.querySelectorAll(".parts td, .parts thead th + th")];
        const left = cells.filter((cell) => getComputedStyle(cell).textAlign !== "right").length;
        const shares = wide.map((each) => (each / wide[0]).toFixed(1));
        document.title = `bars ${shares.join(" ")} left ${left} of ${cells.length}`;
    """
    before, end, after = page.read_text().rpartition("</body>")
    page.write_text(f"{before}<script>{asked}</script>{end}{after}")
    dom = browse(page, tmp_path / "profile", "--dump-dom")
    (title,) = re.findall(r"<title>(bars .*?)</title>", dom)
    assert title == "bars 1.0 3.0 1.0 0.1 0.3 1.0 left 0 of 12"
