"""A federated run as one HTML page, with its summary as JSON."""

from __future__ import annotations

import html
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from laconic.core.atomic_file import write_text
from laconic.tools.report.federation.series import FederatedRun, Row, SchemeRuns, read_federated_run
from laconic.tools.report.html import REPORT, ratio, write_page
from laconic.tools.report.series import Array
from laconic.tools.report.summary import SUMMARY, plain

SETTINGS = (
    *("task", "model", "clients", "per_round", "rounds", "by", "local_steps", "batch", "lr", "momentum"),
    *("seeds", "versions", "machine", "started"),
)
HEADS = (
    ("scheme", "the spec string of the run"),
    ("accuracy, %", "on the test set after the last round, mean ± standard error over seeds"),
    ("test loss", "cross-entropy on the test set after the last round"),
    ("MB up", "that all clients sent in the whole run, every message with its heading"),
    ("MB down", "that the server sent to all clients in the whole run"),
    (
        "times smaller",
        "up and down together: those of the first baseline (--against) divided by these",
    ),
    ("kB up each", "of one client in one round that it takes part in"),
    ("kB down each", "of one client in one round that it takes part in, missed rounds included"),
    ("failed", "answers that were refused, or never made"),
)


def publish_federation(folder: Path, interrupted: str | None = None) -> tuple[list[Row], Path]:
    run = read_federated_run(folder)
    rows = run.rows()
    content = {
        "config": run.config,
        "complete": run.complete,
        "interrupted": interrupted,
        "rows": [asdict(row) for row in rows],
    }
    write_text(folder / SUMMARY, json.dumps(plain(content), indent=1))
    config = run.config
    parts = {
        "@@TITLE@@": html.escape(f"{config['name']}: {config['title']}"),
        "@@LEDE@@": html.escape(lede(run)),
        "@@NOTICE@@": f'<p class="notice">{html.escape(interrupted)}</p>' if interrupted else "",
        "@@TABLE@@": table(rows),
        "@@FACTS@@": "".join(
            f"<dt>{html.escape(name)}</dt><dd>{html.escape(str(config[name]))}</dd>" for name in SETTINGS
        ),
    }
    data = {"methods": [_curves(scheme, config["clients"]) for scheme in run.schemes]}
    return rows, write_page(folder / REPORT, "federation/page.html", parts, data)


def lede(run: FederatedRun) -> str:
    config = run.config
    seeds = f"{config['seeds']} seeds" if config["seeds"] > 1 else "one seed"
    return (
        f"{config['clients']:,} clients, examples dealt by {config['by']}, {config['per_round']} a round,"
        f" {config['rounds']:,} rounds of {config['local_steps']} local steps, {seeds}."
    )


def table(rows: list[Row]) -> str:
    head = "".join(
        f'<th scope="col" title="{html.escape(note)}">{html.escape(name)}</th>' for name, note in HEADS
    )
    body = "".join(f"<tr>{''.join(_cells(row))}</tr>" for row in rows)
    return f"<table id='summary'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(row: Row) -> list[str]:
    values = [
        row.accuracy.text(100),
        row.test_loss.text(digits=3),
        f"{row.up_mb:,.4g}",
        f"{row.down_mb:,.4g}",
        ratio(row.smaller),
        f"{row.up_kb_each:,.4g}",
        f"{row.down_kb_each:,.4g}",
        f"{row.failed:,}",
    ]
    cells = [f'<th scope="row"><i></i><code>{html.escape(row.spec)}</code></th>']
    return cells + [f"<td>{html.escape(value)}</td>" for value in values]


def _curves(scheme: SchemeRuns, clients: int) -> dict[str, Any]:
    tested, accuracies = scheme.tests()
    up, down = scheme.mean_mb("up"), scheme.mean_mb("down")
    rounds = np.arange(1, scheme.rounds + 1, dtype=np.float64)
    both = np.cumsum(up + down)[tested.astype(int) - 1]
    turns = scheme.seeds[0].turns
    return {
        "spec": scheme.spec,
        "accuracy_by_megabyte": _banded(both, 100 * accuracies),
        "accuracy_by_round": _banded(tested, 100 * accuracies),
        "up_by_round": _banded(rounds, up[None]),
        "down_by_round": _banded(rounds, down[None]),
        "turns": [turns[client] for client in range(clients)],
    }


def _banded(x: Array, values: Array) -> dict[str, list[float | None]]:
    mean = values.mean(axis=0)
    error = values.std(axis=0, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else np.zeros_like(mean)
    named = {"x": x, "y": mean, "low": mean - error, "high": mean + error}
    return {name: [float(f"{value:.6g}") for value in series] for name, series in named.items()}
