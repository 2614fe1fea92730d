"""Disturbed commands: a launcher that is killed, a disk that is full, a link that is down.

Failed checks are named as in `verdicts`.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from tests.dist import commands
from tests.dist.runs import same
from tests.dist.test_drops_netns import dropped

from benchmarks.faults.schedule import DISK, LAUNCHER, LINK, Run
from benchmarks.faults.verdicts import CODE, DIVERGED, HANG, LOST, NotDisturbedError
from laconic.core.errors import StateError
from laconic.strategies.distribute import strategy_or_method
from laconic.tools.report.ledger import CONFIG, slug
from laconic.tools.tasks import checkpoint

_LOCK = threading.Lock()
STEPS, EVERY = 60, 5
ARGUMENTS = ("--steps", STEPS, "--eval-every", STEPS, "--checkpoint-every", EVERY)


def kill_launcher(run: Run) -> dict[str, str]:
    """Kill `laconic train` at a checkpoint. Its workers have to end, and the run to resume.

    Raises `NotDisturbedError` if the training was over by then.
    """
    step = EVERY * random.Random(run.key).randrange(1, STEPS // EVERY // 2)
    whole = _whole(run.spec)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        place = _place(folder, "disturbed", run.spec)
        process = _train(run.spec, folder, "disturbed")
        try:
            commands.wait_for(lambda: _last_step(place) >= step, process)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            alive = not commands.group_is_gone(process.pid)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            commands.finish(process)
        if alive:
            return {HANG: "workers outlived the launcher by half a minute"}
        if process.returncode == 0 or _last_step(place) == STEPS:
            raise NotDisturbedError
        return _resume(run, folder, whole)


def fill_disk(run: Run) -> dict[str, str]:
    """Train into a folder on a disk that becomes full; enlarge the disk, and resume."""
    whole = _whole(run.spec)
    need = sum(file.stat().st_size for file in whole.parent.parent.rglob("*") if file.is_file())
    with tempfile.TemporaryDirectory() as temporary, _small_disk(Path(temporary) / "disk") as disk:
        _resize(disk, int(random.Random(run.key).uniform(0.1, 0.9) * need))
        code, _, errors = commands.finish(_train(run.spec, disk, "disturbed"))
        if code not in (1, 2) or "No space left" not in errors:
            return {CODE: f"{code}: {errors[-500:]}"}
        _resize(disk, 64 << 20)
        return _resume(run, disk, whole)


def drop_link(run: Run) -> dict[str, str]:
    """Take the link of one of three hosts down for some seconds. All have to end with equal models."""
    with tempfile.TemporaryDirectory() as temporary:
        results = dropped(Path(temporary), run.spec, run.victim, run.seconds)
    if any(each["model"] != results[0]["model"] or not each["finite"] for each in results):
        return {DIVERGED: str([(each["model"][:8], each["finite"]) for each in results])}
    if any(each != results[0] for each in results):
        return {LOST: str(results)}
    return {}


BY_FAULT: dict[str, Callable[[Run], dict[str, str]]] = {
    DISK: fill_disk,
    LAUNCHER: kill_launcher,
    LINK: drop_link,
}


def failed_checks(run: Run) -> dict[str, str]:
    """Do a run of `BY_FAULT`; return its failed checks, with details. Raises `NotDisturbedError`."""
    try:
        return BY_FAULT[run.fault](run)
    except subprocess.TimeoutExpired as error:
        return {HANG: str(error)}
    except StateError as error:
        return {LOST: str(error)}
    except (AssertionError, ValueError) as error:  # a command or a host ended too early
        return {CODE: str(error)[-500:]}


def _last_step(place: Path) -> int:
    found = checkpoint.latest(place)
    return 0 if found is None else checkpoint.step_of(found)


def _train(spec: str, folder: Path, name: str, *more: object) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    scratch = {"TMPDIR": str(folder.parent)}  # removed with the folder
    return commands.train(folder, *ARGUMENTS, "--with", spec, "--name", name, *more, env=scratch)


def _place(folder: Path, name: str, spec: str) -> Path:
    return folder / name / slug(repr(strategy_or_method(spec))) / "seed0"


@cache
def _undisturbed() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of the undisturbed runs, which exists until the program ends."""
    return tempfile.TemporaryDirectory(prefix="laconic-faults-")


def _whole(spec: str) -> Path:
    """Train undisturbed, once for each spec. Return the folder of the checkpoints."""
    folder = Path(_undisturbed().name) / slug(spec)
    place = _place(folder, "whole", spec)
    with _LOCK:
        if _last_step(place) != STEPS:
            code, _, errors = commands.finish(_train(spec, folder, "whole"))
            assert code == 0, errors
    return place


def _resume(run: Run, folder: Path, whole: Path) -> dict[str, str]:
    """Resume an interrupted run; compare its last checkpoint with that of the undisturbed one."""
    place = _place(folder, "disturbed", run.spec)
    again = ("--resume",) if (folder / "disturbed" / CONFIG).exists() else ()
    code, _, errors = commands.finish(_train(run.spec, folder, "disturbed", *again))
    if code != 0:
        return {CODE: f"resuming ended with {code}: {errors[-500:]}"}
    for rank in range(run.size):
        ends = [
            checkpoint.load(each / f"step-{STEPS:06d}", rank=rank, size=run.size) for each in (whole, place)
        ]
        if not same(*ends):
            return {LOST: f"rank {rank} has other bits than without the fault"}
    return {}


@contextmanager
def _small_disk(place: Path) -> Iterator[Path]:
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "laconic-faults", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def _resize(disk: Path, nbytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={nbytes}", disk], check=True)
