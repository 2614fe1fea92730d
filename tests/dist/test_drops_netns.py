"""A link that is down for a while: the others go on, its rank comes back, and nobody hangs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from laconic.tools.lab import Lab, missing
from laconic.tools.lab.wiring import INTERFACE

from .commands import ROOT, wait_for
from .dropped_rank import PATIENCE_S

LIMIT_S = 200


def switch(lab: Lab, host: int, state: str) -> None:
    command = ["ip", "link", "set", INTERFACE, state]
    assert lab.start(host, command).wait(timeout=20) == 0


def dropped(folder: Path, spec: str, host: int, seconds: float) -> list[dict[str, Any]]:
    """Train on three hosts; the link of one is down for some seconds. Return what each host reports."""
    program = [sys.executable, "-m", "tests.dist.dropped_rank", str(folder), spec]
    with Lab(3) as lab:
        jobs = [
            lab.start(each, program, env=lab.place(each), cwd=ROOT, stdout=subprocess.PIPE, text=True)
            for each in range(lab.hosts)
        ]
        try:
            wait_for(lambda: len(list(folder.glob("begun*"))) == lab.hosts, *jobs)
            switch(lab, host, "down")
            time.sleep(seconds)
            switch(lab, host, "up")
            (folder / "up").touch()
            reports = [json.loads(job.communicate(timeout=LIMIT_S)[0]) for job in jobs]
        finally:
            for job in jobs:
                job.kill()
                job.wait()
    assert reports[0]["regroups"] >= 2 or seconds < 3 * PATIENCE_S, reports
    return reports


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.skipif(missing() is not None, reason="needs network namespaces")
@pytest.mark.parametrize("seconds", [1, 7, 30])
@pytest.mark.parametrize("spec", ["sgp()", "dpsgd()", "local_sgd(every=2)", "diloco(every=2)", "adpsgd()"])
def test_a_link_that_is_down_for_a_while(tmp_path: Path, spec: str, seconds: float) -> None:
    first, *others = dropped(tmp_path, spec, 1, seconds)
    assert first["finite"] and others == [first] * 2
