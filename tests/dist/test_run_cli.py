"""`laconic run` on real processes: what Laconic refuses is one line, a fault of the script a traceback."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

from laconic.core.errors import PeerError
from laconic.tools.cli.main import app
from tests.dist.commands import LACONIC, Ended, interrupt, laconic, start
from tests.dist.nets import compress_anyway
from tests.dist.pool import Pool

REFUSED = "import laconic\nfrom beside import SPEC\n\nlaconic.parse(SPEC)\n"
FAULT = "import os\nimport sys\n\nif os.environ['RANK'] == '1':\n    raise ZeroDivisionError(sys.argv[1])\n"


def ran(folder: Path, script: str, *arguments: str, workers: int = 2) -> Ended:
    (folder / "beside.py").write_text("SPEC = 'dgc(density=2)'\n")
    (folder / "script.py").write_text(script)
    return laconic("run", folder / "script.py", "--nproc-per-node", workers, "--", *arguments)


def test_what_laconic_refuses_is_one_line_for_all_workers(tmp_path: Path) -> None:
    done = ran(tmp_path, REFUSED)
    assert done.code == 1
    (line,) = done.errors.splitlines()
    assert line.startswith("laconic: rank ") and "density must be a number in (0, 1], got 2" in line
    assert line.endswith(f"({tmp_path / 'script.py'}, line 4)")


def test_a_fault_of_the_script_keeps_its_own_traceback(tmp_path: Path) -> None:
    done = ran(tmp_path, FAULT, "the script's argument")
    assert done.code == 1
    first, place, *_, error, said = done.errors.splitlines()
    assert first == "Traceback (most recent call last):"
    assert place == f'  File "{tmp_path / "script.py"}", line 5, in <module>'
    assert error == "ZeroDivisionError: the script's argument"
    assert said.startswith("laconic: rank 1: ") and said.endswith("exit code 1; its output is above")


def test_the_exit_code_is_the_script_s_own(tmp_path: Path) -> None:
    done = ran(tmp_path, "raise SystemExit(7)", workers=1)
    assert done.code == 7 and done.errors.splitlines()[-1].endswith("exit code 7; its output is above")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{script}", "--nproc-per-node", "x"], "torchrun: Unsupported nproc_per_node value: x"),
        (["{script}", "--nproc-per-node", "0"], "--nproc-per-node must be 1 or more, got 0"),
        (["--nproc-per-node=-3", "{script}"], "--nproc-per-node must be 1 or more, got -3"),
        (["{script}", "--nnodes", "0"], "--nnodes must be 1 or more, or a range such as 1:4, got 0"),
        (["{script}", "--nnodes", "3:1"], "--nnodes must be 1 or more, or a range such as 1:4, got 3:1"),
        (["{script}", "--nnodes", "x"], "torchrun: invalid literal for int() with base 10: 'x'"),
        (["{script}", "--max-restarts", "-1"], "--max-restarts must be 0 (none) or more, got -1"),
        (["{script}", "--bogus", "2"], "torchrun: unrecognized arguments: --bogus"),
        (["--nproc-per-node", "2"], "torchrun: the following arguments are required: training_script"),
    ],
)
def test_wrong_flags_are_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    script = tmp_path / "train.py"
    script.touch()
    said = CliRunner().invoke(app, ["run", *(each.format(script=script) for each in arguments)])
    assert (said.exit_code, said.stdout, said.stderr.count("\n")) == (2, "", 1)
    assert said.stderr.startswith(f"laconic: {words}")


@pytest.mark.parametrize("script", ["", ".", "gone.py"])
def test_a_script_that_is_none_is_one_line(script: str) -> None:
    said = CliRunner().invoke(app, ["run", script, "--nproc-per-node", "1"])
    assert (said.exit_code, said.stdout, said.stderr.count("\n")) == (2, "", 1)
    assert said.stderr.startswith(f"laconic: there is no script {script!r} in ")


def dying() -> None:
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compress_anyway(model, optimizer, "cgx()")
    for step in range(3):
        if step == 2 and dist.get_rank() == 0:
            os._exit(0)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()


def test_a_dying_peer_is_called_so_on_the_healthy_rank(pool: Pool) -> None:
    """Each rank by itself: `laconic run` would kill the healthy one."""
    dead, healthy = pool.fresh(2, dying)
    assert dead.exit_code == 0 and isinstance(healthy.error, PeerError)
    said = str(healthy.error)
    assert "a peer of rank 1 died, left or was late" in said
    assert "Unable to cast" not in said and "GLHF" not in said


def is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


def test_ctrl_c_ends_the_wait_for_a_machine_that_does_not_come(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    port = next(filter(is_free, range(20_000 + os.getpid() % 10_000, 32_000)))  # which no kernel picks
    nodes = ("--nnodes", 2, "--node-rank", 0, "--master-addr", "127.0.0.1", "--master-port", port)
    waits = start(*LACONIC, "run", tmp_path / "train.py", *nodes)
    assert waits.stderr is not None
    said = waits.stderr.readline()
    assert said.startswith(f"laconic: waiting for 2 machines at 127.0.0.1:{port}")
    with pytest.raises(subprocess.TimeoutExpired):
        waits.wait(5)  # it is where torch waits
    code, _, complaints = interrupt(waits)
    assert (code, complaints) == (130, "laconic: interrupted\n")
