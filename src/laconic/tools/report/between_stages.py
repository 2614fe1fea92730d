"""Report section on a pipeline: traffic between stages, and waiting."""

from __future__ import annotations

import html

from laconic.tools.report.series import Run
from laconic.tools.report.summary import Row
from laconic.tools.report.wire_parts import wire_parts

HEADS = (
    ("method", "what crosses from stage to stage"),
    ("activations, MB", "per step, from every stage to the next one, all boundaries and replicas"),
    ("gradients, MB", "per step, of these activations, to the stage before"),
    ("replicas, MB", "per step, gradients of weights among replicas"),
    ("waiting, %", "of a step, on the average over stages: for messages, and in the pipeline's bubble"),
)


def between_stages(run: Run, rows: list[Row]) -> str:
    pipeline = run.config.get("pipeline")
    if pipeline is None:
        return ""
    stages, micro = pipeline["stages"], pipeline["micro_batches"]
    bubble = 100 * (stages - 1) / (stages - 1 + micro)
    head = "".join(f'<th scope="col" title="{html.escape(note)}">{name}</th>' for name, note in HEADS)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    return (
        f"<section><h2>Between stages</h2><p>{stages} stages, {micro} micro-batches, schedule"
        f" {html.escape(pipeline['schedule'])}, {pipeline['replicas']} replicas with"
        f" <code>{html.escape(pipeline['between'])}</code>. With equal stages and no time for messages, a"
        f" stage would wait {bubble:.0f} % of a step: the bubble. Bytes are sums over all workers, with"
        f' headers.</p>{wire_parts([(row.spec, _parts(row)) for row in rows])}<div class="scroll">'
        f'<table class="parts"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div></section>"
    )


def _parts(row: Row) -> tuple[float, float, float]:
    return row.activations_mb, row.gradients_mb, row.replicas_mb


def _cells(row: Row) -> str:
    values = [f"{value:.4g}" for value in _parts(row)]
    values.append(f"{100 * row.waiting:.0f}")
    cells = "".join(f"<td>{value}</td>" for value in values)
    return f'<th scope="row"><code>{html.escape(row.spec)}</code></th>{cells}'
