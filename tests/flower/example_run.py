"""The example's deployment as a process, which ends with the block that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"


@contextmanager
def example_run(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Two nodes and two rounds; the output goes to `folder`, printed lines to its file "log"."""
    command = [sys.executable, str(EXAMPLE / "run.py"), "--nodes", "2", "--rounds", "2"]
    with (folder / "log").open("wb") as log:
        script = subprocess.Popen(
            [*command, "--save", str(folder)],
            env={**os.environ, "TMPDIR": str(folder)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield script
    finally:
        if script.poll() is None:
            os.kill(script.pid, signal.SIGTERM)
            script.wait(60)
