"""Damaged wires through every decoder: each must be refused with `WireError`, or give a valid tensor.

    python -m tests.native.fuzz --count 20000                  with the kernels as installed
    python -m tests.native.fuzz --sanitize --count 1000000     with AddressSanitizer and UBSan (`make soak`)
    python -m tests.native.fuzz --only 4711                    one case again

`--sanitize` builds the kernels in `build/asan`, and loads the sanitizer's run-time library before others, so
that every buffer of torch has guarded ends. A read or write out of bounds ends the worker, and the run.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
Sanitizer = tuple[Path, str]  # the extension, and what LD_PRELOAD names
OPTIONS = "detect_leaks=0:allocator_may_return_null=0:halt_on_error=1"


class NoSanitizer(Exception):
    """Why there cannot be a sanitized build here."""


def sanitized(folder: Path, timeout_s: float | None = None, only: str = "") -> Sanitizer:
    """The extension with AddressSanitizer, built where needed, and the libraries to load before it.

    `folder` gets a copy of its own, which no later build can write to while it is loaded.
    `only`: the one target to compile for, in a third of the time; all of them by default.
    """
    build = ROOT / "build" / f"asan{only and '-'}{only}"
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    ninja, cmake = (shutil.which(name, path=_tools()) for name in ("ninja", "cmake"))
    if not compiler or not ninja or not cmake:
        raise NoSanitizer("it needs a C++ compiler, cmake and ninja")
    libraries = [_library(compiler, name) for name in ("libasan.so", "libstdc++.so.6")]
    configure = [cmake, "-S", ROOT, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    settings = [
        "-DLACONIC_SANITIZE=ON",
        "-DSKBUILD=1",
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DLACONIC_ONLY={only}",
    ]
    commands = [*configure, *settings, f"-DPython_EXECUTABLE={sys.executable}"], [ninja, "-C", build]
    with _one_at_a_time(build.with_suffix(".lock")):
        for command in commands:
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                raise NoSanitizer(
                    f"the build takes more than {timeout_s:.0f} s; the next run goes on with it"
                ) from None
            if done.returncode:
                raise RuntimeError(f"the sanitized build failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return Path(shutil.copy(next(build.glob("_native.*")), folder)), ":".join(libraries)


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Builds in one folder take turns, whichever process starts them."""
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _library(compiler: str, name: str) -> str:
    """Where the compiler keeps a library. The sanitizer needs C++'s throw when it starts."""
    asked = [compiler, f"-print-file-name={name}"]
    found = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    if not found.is_absolute():
        raise NoSanitizer(f"{compiler} has no {name}")
    return str(found)


def _tools() -> str:
    """Where programs are looked for: beside this Python first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def start(arguments: list[str], sanitizer: Sanitizer | None) -> subprocess.Popen[str]:
    """A worker process; with the sanitized kernels where these are given."""
    env = dict(os.environ, OMP_NUM_THREADS="1")
    if sanitizer is not None:
        native, libraries = sanitizer
        arguments = [*arguments, "--native", str(native)]
        env |= {"LD_PRELOAD": libraries, "ASAN_OPTIONS": OPTIONS, "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = [sys.executable, "-m", "tests.native.fuzz", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def fuzz(count: int, workers: int = 2, seed: int = 0, sanitizer: Sanitizer | None = None) -> Counter[str]:
    """How many wires were refused and accepted, by decoder. Raises `RuntimeError` where a worker fails."""
    slices = [(count * w // workers, count * (w + 1) // workers) for w in range(workers)]
    pool = [
        start(["--worker", str(first), str(end), "--seed", str(seed)], sanitizer) for first, end in slices
    ]
    outcomes: Counter[str] = Counter()
    failures = []
    for process in pool:
        told, error = process.communicate()
        if process.returncode:
            failures.append(f"a worker ended with {process.returncode}:\n{error[:6000]}")
        else:
            outcomes.update(json.loads(told.splitlines()[-1]))
    if failures:
        raise RuntimeError("\n".join(failures))
    if sum(outcomes.values()) != count:
        raise RuntimeError(f"{count} wires were sent, {sum(outcomes.values())} came out")
    return outcomes


def load(native: str) -> None:
    """Make this file `laconic._native`, before anything imports it."""
    spec = importlib.util.spec_from_file_location("laconic._native", native)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["laconic._native"] = module
    spec.loader.exec_module(module)


def work(first: int, end: int, seed: int) -> None:
    """Run a range of cases in this process, and print the outcomes as JSON."""
    from .wires import attempt

    outcomes = Counter(
        f"{name} {'refused' if refused else 'accepted'}"
        for name, refused in (attempt(seed, i) for i in range(first, end))
    )
    print(json.dumps(outcomes))


def provoke() -> None:
    """Read past the end of a tensor, so that a test can see the sanitizer stop it."""
    import torch

    from laconic import _native
    from laconic.core.layout import Segments

    _native.portable.all_finite(torch.zeros(8), Segments.whole(4096))


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--count", type=int, default=20_000)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--sanitize", action="store_true")
    options.add_argument("--only", type=int, metavar="CASE")
    options.add_argument("--native", help=argparse.SUPPRESS)
    options.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    options.add_argument("--provoke", action="store_true", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.native:
        load(asked.native)
    if asked.provoke:
        return provoke()
    if asked.worker or asked.only is not None:
        return work(*(asked.worker or (asked.only, asked.only + 1)), asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        sanitizer = sanitized(Path(folder)) if asked.sanitize else None
        began = time.monotonic()
        outcomes = fuzz(asked.count, asked.workers, asked.seed, sanitizer)
    for name, number in sorted(outcomes.items()):
        print(f"{number:9,d}  {name}")
    refused = sum(number for name, number in outcomes.items() if name.endswith("refused"))
    how = "AddressSanitizer and UBSan" if sanitizer else "the installed kernels"
    print(
        f"{asked.count:,d} damaged wires with {how}: {refused:,d} refused,"
        f" {asked.count - refused:,d} accepted, no crash, {time.monotonic() - began:.0f} s"
    )
    return None


if __name__ == "__main__":
    main()
