"""`laconic run` on real processes: what Laconic refuses is one line, a fault of the script a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LIMIT_S = 120
REFUSED = "import laconic\nfrom beside import SPEC\n\nlaconic.parse(SPEC)\n"
FAULT = "import os\nimport sys\n\nif os.environ['RANK'] == '1':\n    raise ZeroDivisionError(sys.argv[1])\n"


def run(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "beside.py").write_text("SPEC = 'dgc(density=2)'\n")
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "laconic.cli.main", "run", str(folder / "script.py")]
    return subprocess.run(
        [*command, "--nproc-per-node", "2", "--", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )


def test_what_laconic_refuses_is_one_line_for_all_workers(tmp_path: Path) -> None:
    done = run(tmp_path, REFUSED)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("laconic: rank ") and "density must be a number in (0, 1], got 2" in line
    assert line.endswith(f"({tmp_path / 'script.py'}, line 4)")


def test_a_fault_of_the_script_keeps_its_own_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, FAULT, "the script's argument")
    assert done.returncode == 1
    first, place, *_, error, said = done.stderr.splitlines()
    assert first == "Traceback (most recent call last):"
    assert place == f'  File "{tmp_path / "script.py"}", line 5, in <module>'
    assert error == "ZeroDivisionError: the script's argument"
    assert said.startswith("laconic: rank 1: ") and said.endswith("exit code 1; its output is above")
