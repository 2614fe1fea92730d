"""`measure`: bytes that a model saves for backward, by layer, dense and compressed."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch import Tensor, nn

from laconic.activations.compress import Coding, compress
from laconic.activations.ledger import Ledger
from laconic.activations.session import Session, is_open
from laconic.core.errors import AttachError

WIDE, HIGH = 360, 16  # pixels of the longest bar, and of a row


@dataclass(frozen=True)
class Row:
    """Bytes saved by one layer, or a function after it."""

    name: str
    dense: int
    kept: int


@dataclass(frozen=True)
class Kept:
    """Bytes saved for backward by one forward pass. Each storage counts once, parameters never."""

    spec: str
    rows: tuple[Row, ...]

    @property
    def dense(self) -> int:
        return sum(row.dense for row in self.rows)

    @property
    def kept(self) -> int:
        return sum(row.kept for row in self.rows)

    @property
    def ratio(self) -> float:
        return self.dense / max(self.kept, 1)

    def table(self) -> str:
        """Return a text table with a sum."""
        rows = [*self.rows, Row("all", self.dense, self.kept)]
        wide = max(len(row.name) for row in rows)
        lines = [f"{'kept for backward':{wide}}  {'dense, kB':>12}  {'kept, kB':>12}  {'smaller':>8}"]
        for row in rows:
            times = f"{row.dense / row.kept:.1f}" if row.kept else "-"
            lines.append(f"{row.name:{wide}}  {row.dense / 1e3:12,.1f}  {row.kept / 1e3:12,.1f}  {times:>8}")
        return "\n".join(lines)

    def picture(self) -> str:
        """Return an SVG with bars of dense and compressed bytes."""
        most = max((row.dense for row in self.rows), default=1) or 1
        parts = []
        for i, row in enumerate(self.rows):
            y = HIGH * i
            for nbytes, colour in ((row.dense, "#9bd3cc"), (row.kept, "#00695c")):
                parts.append(
                    f'<rect x="200" y="{y + 2}" width="{WIDE * nbytes / most:.1f}" height="{HIGH - 4}"'
                    f' fill="{colour}"/>'
                )
            parts.append(f'<text x="194" y="{y + 12}" text-anchor="end">{escape(row.name)}</text>')
            caption = f"{row.dense / 1e6:.2f} MB, kept {row.kept / 1e6:.2f}"
            parts.append(f'<text x="{206 + WIDE * row.dense / most:.1f}" y="{y + 12}">{caption}</text>')
        size = f'width="{360 + WIDE}" height="{HIGH * len(self.rows)}"'
        style = 'font-family="sans-serif" font-size="11" fill="#555"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>\n'


def measure(
    model: nn.Module, batch: Tensor | tuple[Any, ...], spec: str | Coding | Session = "comet()"
) -> Kept:
    """Return the bytes that `model` saves for backward on `batch`.

    Does not change the model's buffers, the random state or a session's statistics.

    Args:
        model: Run in its current mode, train or eval.
        batch: The model's argument, or a tuple of arguments.
        spec: As for `compress`, with the bounds of a first step; or a session, with its current bounds.

    Raises:
        AttachError: As for `compress`, or inside its block.

    >>> net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    >>> kept = measure(net, torch.ones(32, 64))
    >>> kept.dense, kept.ratio > 4
    (16384, True)
    """
    if is_open():
        raise AttachError("measure opens its own block: call it outside the block of `compress`")
    session = spec if isinstance(spec, Session) else compress(model, spec)
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    session.ledger = ledger = Ledger()
    try:
        with torch.random.fork_rng(), torch.enable_grad(), session.unchanged(), session:
            out = model(*(batch if isinstance(batch, tuple) else (batch,)))
        del out
    finally:
        session.ledger = None
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                if buffer is not None and before is not None:
                    buffer.copy_(before)
                module._buffers[name] = buffer
    rows = tuple(Row(name, dense, kept) for name, (dense, kept) in ledger.rows.items())
    return Kept(repr(session.coding), rows)
