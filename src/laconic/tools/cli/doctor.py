"""`laconic doctor`: the parts that work or are missing on this machine."""

from __future__ import annotations

import math
import os
import platform
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.table import Table

from laconic import kernels
from laconic.core.errors import DataError
from laconic.core.extras import INSTALL_TRAIN
from laconic.core.units import format_count
from laconic.tools.cli.console import console
from laconic.tools.cli.versions import version_of
from laconic.tools.lab import missing as no_lab
from laconic.tools.tasks import TASKS
from laconic.tools.tasks.precision import DTYPES
from laconic.tools.tasks.source import VARIABLE, data_folder

TRAIN = {
    "plotly": "report.html of `laconic train`",
    "tensorboard": "the scalars of `laconic train`",
    "scikit-learn": "the task digits",
    "pillow": "CIFAR-10 in JPEG files",
}
OPTIONAL = TRAIN | {"triton": "kernels on CUDA tensors", "nanobind": "building the native kernels"}
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
NATIVE_HINT = (
    "native kernels, so the slower reference kernels run: install a C++20 compiler, then pip install"
    " --no-cache ."
)


def doctor() -> None:
    """Show the kernels, versions and backends in use, and anything missing."""
    screen = console()
    screen.print(_facts())
    missing = _missing()
    for line in missing:
        screen.print(f"missing: {line}", style="yellow", markup=False)
    if not missing:
        screen.print("nothing is missing", style="green")
    screen.print(to_try(), style="bold", markup=False)


def to_try() -> str:
    if absent := [package for package in TRAIN if version_of(package) == "not installed"]:
        return f"to try: {INSTALL_TRAIN}, for {' and '.join(absent)}; then laconic demo"
    if (why := no_lab()) is None:
        return "to try: laconic demo, which compares methods over emulated links of 100 Mbit/s"
    return (
        'to try: laconic train digits --workers 2 --with "cgx()" --against "dense()"; no emulated links'
        f" here ({why})"
    )


def _facts() -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("laconic", version_of("laconic"))
    for name, value in kernels.info().items():
        if value is None or name == "triton_missing":
            continue
        shown = ", ".join(map(str, value)) if isinstance(value, (list, tuple, set, frozenset)) else str(value)
        table.add_row("kernels" if name == "live" else f"  {name.replace('_', ' ')}", shown or "none")
    table.add_row("torch", f"{torch.__version__}, {format_count(torch.get_num_threads(), 'thread')}")
    table.add_row(
        "  CPU", f"{torch.backends.cpu.get_cpu_capability()}, {format_count(os.cpu_count() or 1, 'core')}"
    )
    for name, value in gpu_facts():
        table.add_row(name, value)
    table.add_row("  precision", ", ".join(_precisions()))
    table.add_row("  backends", ", ".join(_backends()) or "none")
    table.add_row("Python", f"{platform.python_version()}, {sys.platform}, {platform.machine()}")
    for package in OPTIONAL:
        table.add_row(f"  {package}", version_of(package))
    table.add_row(VARIABLE, os.environ.get(VARIABLE) or "not set")
    for task in TASKS.values():
        table.add_row(f"  {task.name}", _data(task.name))
    return table


def gpu_facts() -> list[tuple[str, str]]:
    if not torch.cuda.is_available():
        return [("  CUDA", "no device")]
    count = torch.cuda.device_count()
    cards = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
    rows = [("  CUDA", f"{torch.version.cuda}, {format_count(count, 'device')}: {cards}")]
    why = kernels.info()["triton_missing"]
    names = ", ".join(with_triton())
    rows.append(
        ("  GPU tensors", f"plain torch, slower: {why}" if why else f"Triton: {names}; others: torch")
    )
    if dist.is_available() and dist.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        order = os.environ.get(LAUNCH_ORDER)
        hint = f"{LAUNCH_ORDER}={order}" if order else f"set {LAUNCH_ORDER}=1 if the model itself uses groups"
        rows.append(("  NCCL", f"{version}; {hint}"))
    return rows


def with_triton() -> list[str]:
    """Return the kernels with a Triton implementation.

    >>> "minmax" in with_triton()
    True
    """
    return sorted(path.parent.name for path in Path(kernels.__file__).parent.glob("*/gpu.py"))


def _precisions() -> list[str]:
    seconds = {name: _product_s(dtype) for name, dtype in {"fp32": torch.float32, **DTYPES}.items()}
    plain = seconds.pop("fp32") or math.nan
    return [
        f"{name} {'does not run' if each is None else speed(plain / each)}" for name, each in seconds.items()
    ]


def speed(ratio: float) -> str:
    """Describe a product's speed relative to fp32.

    >>> speed(2.04), speed(0.97), speed(0.048)
    ('2 times as fast as fp32', 'as fast as fp32', '21 times slower than fp32')
    """
    if 0.95 <= ratio <= 1.05:
        return "as fast as fp32"
    return f"{ratio:.2g} times as fast as fp32" if ratio >= 1 else f"{1 / ratio:.2g} times slower than fp32"


def _product_s(dtype: torch.dtype) -> float | None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        x = torch.randn(256, 256, device=device, dtype=torch.float32).to(dtype)
        took = []
        for _ in range(5):
            began = time.perf_counter()
            float((x @ x)[0, 0])  # synchronise a GPU
            took.append(time.perf_counter() - began)
    except RuntimeError:
        return None
    return min(took)


def _backends() -> list[str]:
    available = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "mpi": dist.is_available() and dist.is_mpi_available(),
    }
    return [name for name, found in available.items() if found]


def _data(task: str) -> str:
    if task == "digits":
        return "comes with scikit-learn"
    try:
        folder = data_folder(None)
    except DataError as error:
        return str(error)
    found = [name for name in TASKS[task].files if folder and (folder / name).exists()]
    return str(Path(folder) / found[0]) if folder and found else "no files"


def _missing() -> list[str]:
    lines = []
    if str(kernels.info()["live"]) == "reference":
        lines.append(NATIVE_HINT)
    if torch.cuda.is_available() and (why := kernels.info()["triton_missing"]):
        lines.append(f"Triton kernels, so the slower reference kernels run on CUDA tensors: {why}")
    for package, use in OPTIONAL.items():
        if package not in ("triton", "nanobind") and version_of(package) == "not installed":
            how = INSTALL_TRAIN if package in TRAIN else f"pip install {package}"
            lines.append(f"{package}, for {use}: {how}")
    if not dist.is_available() or not dist.is_gloo_available():
        lines.append("torch.distributed with gloo: install another build of torch")
    lines += [
        f"data of {task.name}, for that task alone: {task.how}"
        for task in TASKS.values()
        if task.files and _data(task.name) == "no files"
    ]
    if shutil.which("chromium") is None:
        lines.append("chromium, for one test of the report: apt-get install chromium")
    return lines
