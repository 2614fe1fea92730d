"""What a run says while it runs."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from laconic.cli.progress import Progress
from laconic.cli.settings import Settings


def test_the_last_line_of_a_method_has_nothing_left(tmp_path: Path) -> None:
    settings = Settings.of(
        task="digits", model=None, methods=("dense()",), against=(), workers=1, seeds=2, seed=0, steps=40,
        batch=None, lr=None, eval_every=20, checkpoint_every=0, data=None, out=tmp_path, name="x",
        resume=False,
    )  # fmt: skip
    told = io.StringIO()
    with Progress(Console(file=told, width=200), settings) as progress:
        for seed in range(2):
            progress.begin("dense()", seed)
            for step in range(1, 41):
                about = {"method": "dense()", "rank": 0, "step": step}
                progress.show({**about, "kind": "step", "loss": 1.0, "step_s": 1.0, "network_sent": 8})
                if step % 20 == 0:
                    progress.show({**about, "kind": "eval", "right": 1, "answers": 2, "loss_sum": 1.0})
            progress.end("dense()", seed)
    left = [line.rpartition("left ")[2].strip() for line in told.getvalue().splitlines()]
    assert left == ["1:00", "40 s", "20 s", "0 s"]
