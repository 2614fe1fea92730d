"""Copy of a tree in which mutants are applied, with an environment that imports nothing of the original.

The environment is a venv whose path has the copy's sources before the packages of the running interpreter, so
that processes of ranks and `laconic` commands import the copy too.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .table import Mutant

MODULE = f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
IMPORTED = """
import multiprocessing, laconic
print(laconic.__file__)
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(eval, ("__import__('laconic').__file__",)))
"""
COMMAND = """#!{python}
from laconic.tools.cli.main import app
app()
"""


class Scratch:
    """A copy of `tree` in `folder`, which may be an earlier copy.

    Raises `RuntimeError` if the copy is not what its processes import.
    """

    def __init__(self, tree: Path, folder: Path) -> None:
        self.tree, self.folder = tree, folder
        self.python = folder / ".venv" / "bin" / "python"
        self._built = folder / "build" / "mutants"
        self._native = self._find_native()
        self._copy()
        if not self.python.exists():
            self._make_environment()
        self._check()

    def environment(self) -> dict[str, str]:
        """Return the environment variables for commands in the copy."""
        path = os.pathsep.join([str(self.python.parent), os.environ.get("PATH", "")])
        kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        return {**kept, "PATH": path, "PYTHONPATH": str(self.folder / "src")}

    @contextmanager
    def applied(self, mutant: Mutant) -> Iterator[None]:
        """Apply a mutant, and build the native module if it is one of native code."""
        path = self.folder / "src" / "laconic" / mutant.file
        before = (self.tree / "src" / "laconic" / mutant.file).read_text()
        if before.count(mutant.old) != 1:
            raise ValueError(f"{mutant.name}: its old text occurs {before.count(mutant.old)} times")
        try:
            self._write(path, before.replace(mutant.old, mutant.new).encode())
            if mutant.native:
                self._build()
                self._install(self._built / MODULE)
            yield
        finally:
            self._write(path, before.encode())
            if mutant.native:
                self._install(self._native)

    def _write(self, path: Path, text: bytes) -> None:
        path.write_bytes(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()  # it could have the size and the second of the new text

    def _install(self, module: Path) -> None:
        new = self.folder / "src" / "laconic" / f".{MODULE}"
        shutil.copyfile(module, new)
        new.replace(new.with_name(MODULE))

    def _copy(self) -> None:
        """Make the files those that git knows in the tree or would add, and the native module its own."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=self.tree, capture_output=True, check=True).stdout
        names = {name for name in listed.decode().split("\0") if name and (self.tree / name).is_file()}
        for name in names:
            to = self.folder / name
            if not to.exists() or not filecmp.cmp(self.tree / name, to, shallow=False):
                to.parent.mkdir(parents=True, exist_ok=True)
                self._write(to, (self.tree / name).read_bytes())
        for path in [path for top in ("src", "tests") for path in (self.folder / top).rglob("*.py")]:
            if str(path.relative_to(self.folder)) not in names:
                path.unlink()
        self._install(self._native)

    def _find_native(self) -> Path:
        """Return the native module of the tree, or else of the running interpreter's packages."""
        places = [self.tree / "src", *map(Path, sys.path)]
        found = next((path for each in places if (path := each / "laconic" / MODULE).exists()), None)
        if found is None:
            raise RuntimeError(f"there is no {MODULE} for {self.tree}: build it with `make setup`")
        return found

    def _make_environment(self) -> None:
        venv.EnvBuilder(symlinks=True).create(self.folder / ".venv")
        packages = [path for path in sys.path if path.endswith("site-packages")]
        site = next((self.folder / ".venv" / "lib").glob("python*/site-packages"))
        (site / "copy.pth").write_text("\n".join([str(self.folder / "src"), *packages, ""]))
        command = self.python.with_name("laconic")
        command.write_text(COMMAND.format(python=self.python))
        command.chmod(0o755)

    def _check(self) -> None:
        script = self.folder / "build" / "imported.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text(IMPORTED)
        command = [self.python, script]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment(), capture_output=True, text=True, check=True
        )
        wanted = str(self.folder / "src" / "laconic" / "__init__.py")
        if {*done.stdout.split()} != {wanted}:
            raise RuntimeError(f"the copy must be imported from {wanted}, got {done.stdout.split()}")

    def _build(self) -> None:
        """Build the copy's native module, as far as it has changed."""
        beside = [str(Path(each).parents[2] / "bin") for each in sys.path if each.endswith("site-packages")]
        tools = os.pathsep.join([*beside, os.environ.get("PATH", "")])
        cmake, ninja = (shutil.which(name, path=tools) for name in ("cmake", "ninja"))
        if cmake is None or ninja is None:
            raise RuntimeError("mutants of native code need cmake and ninja")
        configure = [cmake, "-S", self.folder, "-B", self._built, "-G", "Ninja", "-DSKBUILD=1"]
        configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}", "-DCMAKE_BUILD_TYPE=Release"]
        commands = [] if (self._built / "build.ninja").exists() else [configure]
        commands[-1:] = [[*each, f"-DPython_EXECUTABLE={self.python}"] for each in commands[-1:]]
        for command in [*commands, [ninja, "-C", self._built, "_native"]]:
            subprocess.run(command, env=self.environment(), check=True, capture_output=True)
