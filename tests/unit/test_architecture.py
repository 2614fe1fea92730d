"""The house itself: imports point down, files are small, `import laconic` is light, names mean one thing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import laconic
from laconic.core import spec

SOURCE = (
    Path(laconic.__file__).parent
    if (Path(laconic.__file__).parent / "py.typed").exists()
    else Path("src/laconic")
)
FILES = sorted(SOURCE.rglob("*.py"))
FLOORS = {
    "core": 0,
    "kernels": 1,
    "codecs": 2,
    "feedback": 3,
    "comm": 4,
    "reducers": 5,
    "strategies": 6,
    "optim": 6.5,
    "lowbit": 6.5,
    "plan": 7,
    "methods": 8,
    "lab": 9,
    "report": 9,
    "tasks": 9,
    "cli": 10,
}
HEAVY = ("triton", "flwr", "matplotlib", "plotly", "sklearn", "tensorboard", "typer", "rich", "PIL", "scipy")


def room(path: Path) -> str | None:
    inside = path.relative_to(SOURCE).parts
    return inside[0] if len(inside) > 1 else None


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for module in modules:
            parts = module.split(".")
            if parts[0] == "laconic" and len(parts) > 1 and parts[1] in FLOORS:
                found.add(parts[1])
    return found


def test_there_is_a_house_to_test() -> None:
    assert len(FILES) > 40
    assert {room(path) for path in FILES} >= {
        "core",
        "kernels",
        "codecs",
        "feedback",
        "comm",
        "reducers",
        "strategies",
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    here = room(path)
    if here is None:
        return  # the front door opens every room
    upward = {other for other in imported_rooms(path) if other != here and FLOORS[other] >= FLOORS[here]}
    assert not upward, f"{here} must not import {sorted(upward)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_holds_one_concept(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= 300, f"{lines} lines: what is the second concept?"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text)), "a file begins with a docstring"


def test_import_is_light() -> None:
    code = (
        "import sys, laconic\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "import torch\n"
        "assert not heavy, heavy\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_name_means_one_thing() -> None:
    homes: dict[str, list[Path]] = {}
    for where in spec.ROOMS:
        for path in (SOURCE / Path(*where.split(".")[1:])).glob("*.py"):
            if path.stem != "__init__":
                homes.setdefault(path.stem, []).append(path)
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1}


def test_every_public_name_is_there() -> None:
    assert set(laconic.__all__) >= {"Codec", "compress", "methods", "parse", "resize"}
    assert all(hasattr(laconic, name) for name in laconic.__all__)
