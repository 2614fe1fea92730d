"""A run as one self-contained HTML page."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from laconic.core.atomic_file import write_text
from laconic.tools.report.between_stages import between_stages
from laconic.tools.report.curves import (
    Curve,
    accuracy_by_step,
    consensus_by_step,
    loss_by_megabyte,
    loss_by_step,
    scale_by_step,
)
from laconic.tools.report.loss_scale import loss_scale, precision_words
from laconic.tools.report.noise import noise_section
from laconic.tools.report.reaching import target_of
from laconic.tools.report.series import MethodSeries, Run
from laconic.tools.report.side_by_side import side_by_side
from laconic.tools.report.summary import Row, counted, flips, in_use, kept_bytes, residuals
from laconic.tools.report.together import together

REPORT = "report.html"
PHASES = {
    "training": ("forward_s", "backward_s", "update_s"),
    "exchange": ("encode_s", "communicate_s", "decode_s"),
}
VERSUS = "vs. baseline"
HEADS = (
    ("method", "the spec string of the run"),
    ("optimiser", "the optimiser, and its peak learning rate"),
    ("accuracy, %", "on the test set after the last step, mean ± standard error over seeds"),
    ("test loss", "cross-entropy on the test set after the last step"),
    (
        "MB per step",
        "that a worker puts on the wire, every copy and header, in the second half of the steps",
    ),
    ("times smaller", "than a dense all-reduce among as many workers, in the second half of the steps"),
    (VERSUS, "the first baseline's MB per step divided by this method's"),
    ("MB in total", "that a worker puts on the wire in the whole training, including warm-up"),
    ("payload, MB", "per step: what a worker hands to collectives, each message counted once"),
    ("step, ms", "median over the second half of the steps"),
)


def write_report(folder: Path, run: Run, rows: list[Row], interrupted: str | None) -> Path:
    data = {"methods": [_method_data(method) for method in run.methods], "phases": PHASES}
    sentences = (residuals(rows), flips(rows), in_use(rows), counted(rows), kept_bytes(rows))
    parts = {
        "@@TITLE@@": html.escape(f"{run.config['name']}: {run.config['title']}"),
        "@@LEDE@@": html.escape(" ".join(filter(None, (lede(run), *sentences)))),
        "@@NOTICE@@": f'<p class="notice">{html.escape(interrupted)}</p>' if interrupted else "",
        "@@TABLE@@": table(rows, target_of(run.config)),
        "@@TOGETHER@@": between_stages(run, rows) + blocks(run) + together(run) + noise(run),
        "@@PRECISION@@": loss_scale(run),
        "@@FACTS@@": facts(run),
    }
    return write_page(folder / REPORT, "page.html", parts, data)


def write_page(path: Path, template: str, parts: Mapping[str, str], data: Any) -> Path:
    from plotly.offline import get_plotlyjs  # 5 MB of script

    home = files("laconic.tools.report")
    page = (home / template).read_text(encoding="utf-8")
    shared = {
        "@@STYLE@@": (home / "page.css").read_text(encoding="utf-8"),
        "@@CURVES@@": (home / "curves.js").read_text(encoding="utf-8"),
        "@@DATA@@": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        "@@PLOTLY@@": get_plotlyjs(),
    }
    for mark, text in {**parts, **shared}.items():
        page = page.replace(mark, text)
    write_text(path, page)
    return path


def blocks(run: Run) -> str:
    return side_by_side([(method.spec, method.seeds[0].blocks) for method in run.methods])


def noise(run: Run) -> str:
    series = ((method.spec, method.seeds[0].noise) for method in run.methods)
    return noise_section(series, run.config["batch"], run.config["workers"])


def lede(run: Run) -> str:
    config = run.config
    seeds = f"{config['seeds']} seeds" if config["seeds"] > 1 else "one seed"
    methods = f"{len(config['methods'])} methods" if len(config["methods"]) > 1 else "one method"
    skew = config.get("skew")
    own = "" if skew is None else f" Each worker has its own examples: Dirichlet({skew:g}) per label."
    masks = "" if config.get("sparsity") is None else f" Weights in use by {config['sparsity']}."
    low = "" if config.get("bits") is None else f" Layers compute in {config['bits']} bits, simulated."
    if config.get("copies", 1) > 1:
        low += f" Each example in {config['copies']} augmentations, across {config['across']}."
    low += f" Weights trained by {config['lowbit']}." if config.get("lowbit") else ""
    pipeline = config.get("pipeline")
    sharers = config["workers"] if pipeline is None else pipeline["replicas"]
    cut = "" if pipeline is None else f" as {pipeline['replicas']} x {pipeline['stages']} stages"
    return (
        f"{methods.capitalize()}, {seeds} each, {config['workers']} workers{cut}, {config['steps']:,} steps "
        f"of {sharers * config['batch']} examples.{own}{low}{masks}{precision_words(config.get('precision'))}"
    )


def table(rows: list[Row], target: float | None = None) -> str:
    alike = all(ratio(row.smaller) == ratio(row.against_first) for row in rows)
    shown = [i for i, (name, _) in enumerate(HEADS) if not (alike and name == VERSUS)]
    timed = () if target is None else ((f"s to {target:g} %", "seconds of steps until a test reaches it"),)
    heads = [HEADS[i] for i in shown]
    heads[2:2] = timed
    head = "".join(
        f'<th scope="col" title="{html.escape(note)}">{html.escape(name)}</th>' for name, note in heads
    )
    body = ""
    for row in rows:
        found = _cells(row)
        cells = [found[i] for i in shown]
        cells[2:2] = [f"<td>{row.reach_s.text(digits=1)}</td>" for _ in timed]
        body += f"<tr>{''.join(cells)}</tr>"
    return f"<table id='summary'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def facts(run: Run) -> str:
    shown = (
        "task",
        "model",
        "workers",
        "steps",
        "batch",
        "lr",
        "skew",
        "bits",
        "precision",
        "recipe",
        "lowbit",
        "activations",
        "examples",
        "sparsity",
        "seeds",
        "versions",
        "machine",
        "started",
    )
    return "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(str(run.config[name]))}</dd>"
        for name in shown
        if run.config.get(name) is not None
    )


def _cells(row: Row) -> list[str]:
    values = [
        row.optimiser or "-",
        row.accuracy.text(100),
        row.test_loss.text(digits=3),
        f"{row.wire_mb:.4g}",
        ratio(row.smaller),
        ratio(row.against_first),
        f"{row.total_mb:,.1f}",
        f"{row.payload_mb:.4g}",
        row.step_s.text(1000, 1),
    ]
    cells = [f'<th scope="row"><i></i><code>{breakable(row.spec)}</code></th>']
    return cells + [f"<td>{html.escape(value)}</td>" for value in values]


def breakable(spec: str) -> str:
    """Return a spec as HTML that breaks between arguments.

    >>> breakable("topk(density=0.01, more=1)")
    'topk(<wbr>density=0.01, <wbr>more=1)'
    """
    return html.escape(spec).replace("(", "(<wbr>").replace(", ", ", <wbr>").replace("(<wbr>)", "()")


def ratio(value: float) -> str:
    """Return a ratio with suitable precision.

    >>> ratio(1.0), ratio(71.94), ratio(math.inf)
    ('1.00 ×', '71.9 ×', '-')
    """  # noqa: RUF002
    if not math.isfinite(value):
        return "-"
    return f"{value:.1f} ×" if value >= 10 else f"{value:.2f} ×"  # noqa: RUF001


def _method_data(method: MethodSeries) -> dict[str, Any]:
    late = slice(method.common // 2, None)
    names = [name for phase in PHASES.values() for name in phase]
    return {
        "spec": method.spec,
        "loss_by_step": _curve_data(loss_by_step(method)),
        "loss_by_megabyte": _curve_data(loss_by_megabyte(method)),
        "accuracy_by_step": _curve_data(accuracy_by_step(method)),
        "consensus_by_step": None if (apart := consensus_by_step(method)) is None else _curve_data(apart),
        "scale_by_step": None if (scale := scale_by_step(method)) is None else _curve_data(scale),
        "talk": method.seeds[0].notes.talk,
        "ms": {name: 1000 * float(method.over_seeds(name)[:, late].mean()) for name in names},
    }


def _curve_data(curve: Curve) -> dict[str, list[float | None]]:
    named = {"x": curve.x, "y": curve.y, "low": curve.low, "high": curve.high}
    return {
        name: [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
        for name, values in named.items()
    }
