"""`measure`: bytes that a model keeps for backward, layer by layer, dense and compressed."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch import Tensor, nn

from laconic.activations.coding import Coding
from laconic.activations.compress import compress
from laconic.activations.ledger import Ledger
from laconic.activations.session import Session, opened
from laconic.core.errors import AttachError

WIDE, HIGH = 360, 16  # pixels of the longest bar, and of a row


@dataclass(frozen=True)
class Row:
    """What one layer, or one function after it, keeps. Bytes."""

    name: str
    dense: int
    kept: int


@dataclass(frozen=True)
class Kept:
    """Bytes kept for backward by one forward pass. Each storage counts once, and parameters not at all."""

    spec: str
    rows: tuple[Row, ...]

    @property
    def dense(self) -> int:
        """Bytes without compression."""
        return sum(row.dense for row in self.rows)

    @property
    def kept(self) -> int:
        """Bytes with it."""
        return sum(row.kept for row in self.rows)

    @property
    def ratio(self) -> float:
        """Times smaller."""
        return self.dense / max(self.kept, 1)

    def table(self) -> str:
        """A line a row, and the sum."""
        rows = [*self.rows, Row("all", self.dense, self.kept)]
        wide = max(len(row.name) for row in rows)
        lines = [f"{'kept for backward':{wide}}  {'dense, kB':>12}  {'kept, kB':>12}  {'smaller':>8}"]
        for row in rows:
            times = f"{row.dense / row.kept:.1f}" if row.kept else "-"
            lines.append(f"{row.name:{wide}}  {row.dense / 1e3:12,.1f}  {row.kept / 1e3:12,.1f}  {times:>8}")
        return "\n".join(lines)

    def picture(self) -> str:
        """An SVG: for each row a pale bar of the dense bytes, and a dark one of those kept."""
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
            told = f"{row.dense / 1e6:.2f} MB, kept {row.kept / 1e6:.2f}"
            parts.append(f'<text x="{206 + WIDE * row.dense / most:.1f}" y="{y + 12}">{told}</text>')
        size = f'width="{360 + WIDE}" height="{HIGH * len(self.rows)}"'
        style = 'font-family="sans-serif" font-size="11" fill="#555"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>\n'


def measure(
    model: nn.Module, batch: Tensor | tuple[Any, ...], spec: str | Coding | Session = "comet()"
) -> Kept:
    """What a forward pass of `model` on `batch` keeps.

    The model's buffers, the random state and what a session has learned stay as they are.

    Args:
        model: in the mode that it is in.
        batch: its argument, or a tuple of them.
        spec: what `compress` takes, with the bounds of a first step; or its session, with today's bounds.

    Raises:
        AttachError: inside a block of `compress`, as it opens one of its own; else as `compress` does.

    >>> net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    >>> kept = measure(net, torch.ones(32, 64))
    >>> kept.dense, kept.ratio > 4
    (16384, True)
    """
    if opened():
        raise AttachError("measure opens a block of its own: call it outside of the block of `compress`")
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
