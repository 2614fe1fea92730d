"""A link between ranks on the stand-in device: offers stay on the host, and only the body is waited for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_link_sends_offers_from_the_host(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.device.link_rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            rank.wait(timeout=120)
    finally:
        for rank in ranks:
            rank.kill()
        said = [rank.communicate()[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
