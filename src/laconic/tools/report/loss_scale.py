"""Report section on mixed precision: the loss scale, and skipped steps."""

from __future__ import annotations

import html

from laconic.tools.report.curves import scale_by_step
from laconic.tools.report.series import MethodSeries, Run

WORDS = {"bf16": "bfloat16", "fp16": "float16, with loss scaling"}
SCALE = """\
<figure><h2>Loss scale</h2><p class="note">Halved where gradients overflow, doubled after 2,000 steps without;
mean over seeds</p><div class="plot" id="scale_by_step"></div></figure>"""


def precision_words(precision: str | None) -> str:
    """Describe a precision.

    >>> precision_words("bf16"), precision_words(None)
    (' Forward and backward in bfloat16.', '')
    """
    return "" if precision is None else f" Forward and backward in {WORDS[precision]}."


def loss_scale(run: Run) -> str:
    scaled = [method for method in run.methods if scale_by_step(method) is not None]
    if not scaled:
        return ""
    terms = "".join(
        f"<dt><code>{html.escape(each.spec)}</code></dt><dd>{_told(each)}</dd>" for each in scaled
    )
    return f'<section><h2>Mixed precision</h2><dl>{terms}</dl><div class="grid">{SCALE}</div></section>'


def _told(method: MethodSeries) -> str:
    parts = (
        f"seed {seed.seed}: {seed.skipped} of {len(seed.steps):,} steps skipped, scale"
        f" {seed.loss_scale[-1]:g} at the last step"
        for seed in method.seeds
    )
    return "; ".join(parts)
