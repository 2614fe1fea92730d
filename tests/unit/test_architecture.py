"""Rules of the package: imports point down, files are small, `import laconic` is light, names are clear."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import get_origin

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
    "exchange": 6,
    "optim": 7,
    "data": 7,
    "fsdp": 8,
    "transforms": 8,
    "lowbit": 9,
    "ddp": 9,
    "sparsity": 10,
    "activations": 10,
    "admm": 9,
    "pipeline": 9,
    "recipes": 10,
    "strategies": 10,
    "federated": 11,
    "replicator": 11,
    "methods": 12,
    "integrations": 13,
    "tools.plan": 14,
    "tools.lab": 15,
    "tools.report": 15,
    "tools.tasks": 16,
    "tools.cli": 17,
}
MAX_LINES = 300
NAMED = {  # public packages of names, and the rooms that hold these
    "codecs": ("codecs",),
    "feedback": ("feedback",),
    "indices": ("codecs.indices",),
    "methods": ("methods",),
    "reducers": ("reducers",),
    "selectors": ("codecs.selectors",),
    "strategies": ("strategies.gossip", "strategies.leaders", "strategies.local_steps"),
    "topologies": ("strategies.gossip.topologies",),
}
HEAVY = ("triton", "flwr", "matplotlib", "plotly", "sklearn", "tensorboard", "typer", "rich", "PIL", "scipy")
HEAVY += ("lightning", "accelerate", "transformers", "ray")


def room(path: Path) -> str | None:
    *folders, _ = path.relative_to(SOURCE).parts
    return package(folders)


def package(parts: list[str]) -> str | None:
    """The package that FLOORS lists: the first folder, or the second inside `tools`."""
    name = ".".join(parts[: 2 if parts[:1] == ["tools"] else 1])
    return name if name in FLOORS else None


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for module in modules:
            first, *parts = module.split(".")
            if first == "laconic" and (name := package(parts)) is not None:
                found.add(name)
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
        "exchange",
        "ddp",
        "fsdp",
        "strategies",
    }


def test_imports_point_down() -> None:
    """The top level of the package may import everything."""
    upward = {
        f"{path.relative_to(SOURCE)}: {other}"
        for path in FILES
        if (here := room(path)) is not None
        for other in imported_rooms(path)
        if other != here and FLOORS[other] >= FLOORS[here]
    }
    assert not upward, "imports upward: " + ", ".join(sorted(upward))


def test_a_file_holds_one_concept() -> None:
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in FILES}
    longer = {name: lines for name, lines in lengths.items() if lines > MAX_LINES}
    assert not longer, f"files of more than {MAX_LINES} lines; move the second concept out: {longer}"


def test_a_file_starts_with_a_docstring() -> None:
    texts = {path: path.read_text() for path in FILES}
    without = [
        path for path, text in texts.items() if text.strip() and not ast.get_docstring(ast.parse(text))
    ]
    assert not without, f"files without a docstring: {[str(path.relative_to(SOURCE)) for path in without]}"


def test_import_loads_nothing_that_torch_has_not_loaded() -> None:
    """Our public names add only our own files to torch's import time."""
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import laconic\n"
        "public = [getattr(laconic, name) for name in laconic.__all__]\n"
        "added = {name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names\n"
        "assert added <= {'laconic', 'torch', 'numpy'}, added\n"
        "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('laconic.')}\n"
        "assert 'tools' not in rooms, rooms\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_import_is_lazy_and_light() -> None:
    """`import laconic` loads no torch and none of our packages but `core`, and leaves signals as they are.

    A script that then compresses gradients waits for no transform, strategy, replicator or integration.
    """
    code = (
        "import signal, sys\n"
        "before = [signal.getsignal(number) for number in signal.valid_signals()]\n"
        "import laconic\n"
        "assert [signal.getsignal(number) for number in signal.valid_signals()] == before\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "def loaded():\n"
        "    return {name.split('.')[1] for name in sys.modules if name.startswith('laconic.')}\n"
        "assert loaded() == {'core'}, loaded()\n"
        "laconic.compress, laconic.parse, laconic.resize, laconic.Codec\n"
        "assert loaded() <= {'core', 'kernels', 'codecs', 'feedback', 'comm', 'reducers', 'exchange',"
        " 'optim', 'ddp', '_native'}, loaded()\n"
        "public = [getattr(laconic, name) for name in laconic.__all__]\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "import torch\n"
        "assert not heavy, heavy\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def in_room(where: str) -> list[Path]:
    """Modules and packages at the top level of a room, other than rooms inside it."""
    folder = SOURCE / Path(*where.split(".")[1:])
    found = [path for path in folder.glob("*.py") if path.stem != "__init__"]
    found += [path.parent for path in folder.glob("*/__init__.py")]
    return sorted(path for path in found if f"{where}.{path.stem}" not in spec.SPEC_PACKAGES)


@pytest.mark.parametrize("where", spec.SPEC_PACKAGES)
def test_a_room_is_a_table_of_contents(where: str) -> None:
    """A file in a registry room is a registered name; a helper is inside a family's package."""
    names = set(spec.names())
    helpers = [path.name for path in in_room(where) if path.suffix == ".py" and path.stem not in names]
    assert not helpers, f"{where} holds helpers beside names: move them into the package that they serve"


def test_a_name_means_one_thing() -> None:
    homes: dict[str, list[Path]] = {}
    for where in spec.SPEC_PACKAGES:
        for path in in_room(where):
            inside = [path] if path.suffix else [path, *path.glob("*.py")]
            for each in inside:
                if each.stem != "__init__":
                    homes.setdefault(each.stem, []).append(each)
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1}


@pytest.mark.parametrize("where", spec.MIXED_PACKAGES)
def test_every_spec_of_a_library_is_found_by_its_file(where: str) -> None:
    folder = SOURCE / Path(*where.split(".")[1:])
    for path in folder.rglob("*.py"):
        home = ".".join(["laconic", *path.relative_to(SOURCE).with_suffix("").parts])
        for value in vars(importlib.import_module(home.removesuffix(".__init__"))).values():
            # Python 3.10 counts list[int] among the classes
            is_class = isinstance(value, type) and get_origin(value) is None
            is_spec = is_class and issubclass(value, spec.Spec)
            if is_spec and value.__module__ == home and not inspect.isabstract(value):
                assert spec.find(value.name) is value and value.name == path.stem


def registered(package: ModuleType) -> set[str]:
    """Return the registered names that the package's rooms hold."""
    rooms = NAMED[package.__name__.removeprefix("laconic.")]
    homes = {name: spec.modules().get(name, "") for name in spec.names()}
    holds = {
        name: max((each for each in spec.SPEC_PACKAGES if home.startswith(f"{each}.")), key=len, default="")
        for name, home in homes.items()
    }
    return {name for name, room in holds.items() if room.removeprefix("laconic.") in rooms}


@pytest.mark.parametrize("name", NAMED)
def test_names_are_typed_callables(name: str) -> None:
    """`laconic.codecs.qsgd(levels=7)` is `parse("qsgd(levels=7)")`, and editors know its arguments."""
    package = importlib.import_module(f"laconic.{name}")
    expected = registered(package)
    public = {each for each in package.__all__ if each.islower()}
    assert public - {"catalogue"} == expected, "list each registered name in __all__"
    tree = ast.parse(Path(inspect.getfile(package)).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    declared = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names:
            declared[alias.asname] = getattr(importlib.import_module(node.module), alias.name)
    assert declared == {each: spec.find(each) for each in expected}, "import it under TYPE_CHECKING"
    for each in expected:
        assert getattr(package, each) is spec.find(each)


def test_a_typed_call_equals_its_string() -> None:
    assert laconic.methods.dgc(density=0.01) == laconic.parse("dgc(density=0.01)")
    assert laconic.strategies.diloco(every=50) == laconic.parse("diloco(every=50)")
    sparse = laconic.codecs.sparse(laconic.selectors.topk(density=0.01), indices=laconic.indices.golomb())
    assert sparse == laconic.parse("sparse(topk(density=0.01), indices=golomb())")


def test_every_public_name_is_there() -> None:
    assert set(laconic.__all__) >= {
        "Codec",
        "catalogue",
        "compress",
        "distribute",
        "federated",
        "parse",
        "resize",
    }
    assert all(hasattr(laconic, name) for name in laconic.__all__)


def test_a_room_is_not_hidden_by_a_public_name() -> None:
    """`import laconic.methods.dgc as dgc` reads the attribute `methods` of `laconic`."""
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert rooms >= {"methods", "optim"}
    for name in rooms:
        assert isinstance(getattr(laconic, name, laconic), ModuleType), name
    assert callable(importlib.import_module("laconic.methods.dgc").dgc)
