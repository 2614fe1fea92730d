"""`laconic bench`: a benchmark of the repository, run from a checkout of it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from laconic.cli.console import console
from laconic.core.errors import SpecError

PROJECT = 'name = "laconic"'  # a line of the repository's pyproject.toml
RANK = "_rank"  # ends the names of modules that a benchmark runs on each worker


def bench(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[NAME [OPTIONS...]]")] = None,
) -> None:
    """Run a benchmark of the checkout that this folder is in: `laconic bench steps --quick`.

    OPTIONS are the benchmark's own; all know --help, and most know --quick, a short pass that keeps nothing.
    Without it they write benchmarks/results/, from which `make docs` makes the pages. Without a NAME: which
    there are.
    """
    root = checkout(Path.cwd())
    found = benchmarks(root)
    if not arguments:
        return show(found)
    name, *options = arguments
    if name not in found:
        raise SpecError(f"there is no benchmark {name!r}; there are {', '.join(found)}")
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False)
    if ended.returncode:
        raise typer.Exit(ended.returncode if ended.returncode > 0 else 128 - ended.returncode)
    return None


def checkout(folder: Path) -> Path:
    """The repository that this folder is in. Raises `SpecError` outside of one."""
    for root in (folder, *folder.parents):
        project = root / "pyproject.toml"
        named = project.is_file() and PROJECT in project.read_text(encoding="utf-8").splitlines()
        if named and (root / "benchmarks" / "__init__.py").is_file():
            return root
    raise SpecError(
        f"{folder} is in no checkout of Laconic: benchmarks are not part of the installed package; get the"
        " repository, run `make setup` there, and call `laconic bench` from a folder of it"
    )


def benchmarks(root: Path) -> dict[str, str]:
    """The modules of the repository's benchmarks that can be run, each with what its first line says."""
    found = {}
    for file in sorted((root / "benchmarks").glob("*.py")):
        text = file.read_text(encoding="utf-8")
        if '\nif __name__ == "__main__":' in text and not file.stem.endswith(RANK):
            about = ast.get_docstring(ast.parse(text)) or ""
            found[file.stem] = about.partition("\n")[0]
    return found


def show(found: dict[str, str]) -> None:
    """Names and what they measure."""
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(style="cyan")
    table.add_column()
    for name, about in found.items():
        table.add_row(name, about)
    console().print(table)
