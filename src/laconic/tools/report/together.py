"""Report section on the agreement of replicas."""

from __future__ import annotations

import html

from laconic.tools.report.curves import consensus_by_step
from laconic.tools.report.series import MethodSeries, Run

CONSENSUS = """\
<figure><h2>Distance of ranks from their average</h2>
<p class="note">Percent of its norm, root mean square over ranks, at each test; no point just after an
averaging</p><div class="plot" id="consensus_by_step"></div></figure>"""


def together(run: Run) -> str:
    parts = [CONSENSUS] if any(consensus_by_step(method) is not None for method in run.methods) else []
    parts += [_talk(number, method) for number, method in enumerate(run.methods)]
    notes = [(method.spec, method.seeds[0].notes.words()) for method in run.methods]
    terms = "".join(
        f"<dt><code>{html.escape(spec)}</code></dt><dd>{words}</dd>" for spec, words in notes if words
    )
    if not terms and not any(parts):
        return ""
    return (
        f"<section><h2>How replicas stay together</h2>{f'<dl>{terms}</dl>' if terms else ''}"
        f'<div class="grid">{"".join(parts)}</div></section>'
    )


def _talk(number: int, method: MethodSeries) -> str:
    if method.seeds[0].notes.talk is None:
        return ""
    return (
        f"<figure><h2>Who sent to whom: <code>{html.escape(method.spec)}</code></h2>"
        '<p class="note">Messages in the whole training, first seed</p>'
        f'<div class="plot" id="talk{number}"></div></figure>'
    )
