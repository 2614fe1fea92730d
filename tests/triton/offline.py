"""Compile a Triton kernel for a GPU that is not there, and read its registers and instructions.

Triton's wheel contains ptxas, cuobjdump and nvdisasm. A test file lists its kernels as `KERNELS` and calls
`check(kernel, target)`; `python -m tests.triton.offline` writes those of all to kernels.json.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MOST_REGISTERS = 128
INEXACT = ("div.full", "div.approx", ".ftz", "fma.rn.f32", "sqrt.approx")


@dataclass(frozen=True)
class Kernel:
    """One specialisation of a kernel: what `fn[grid](...)` compiles for such arguments.

    `signature`: type of each argument that is no constexpr, such as {"x_ptr": "*fp32", "n": "i64"};
    `aligned`: arguments divisible by 16, as PyTorch's tensors are; `elements`: elements of one program;
    `most`: the most SASS instructions an element; `wide`: whether there must be 128-bit loads.
    """

    name: str
    fn: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    aligned: tuple[str, ...] = ()
    elements: int = 4096
    num_warps: int = 8
    options: Mapping[str, Any] = field(default_factory=dict)
    most: float | None = None
    wide: bool = True


@dataclass(frozen=True)
class Report:
    """Resources of a compiled kernel; `per_element`: instructions of a thread for each of its elements."""

    registers: int
    spilled: int
    shared: int
    instructions: int
    per_element: float
    wide_loads: int
    inexact: tuple[str, ...]


def compiled(kernel: Kernel, target: str) -> Any:
    """Return Triton's compiled kernel for a target of `TARGETS`."""
    names = kernel.fn.arg_names
    signature = {name: "constexpr" if name in kernel.constexprs else kernel.signature[name] for name in names}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in kernel.aligned}
    source = ASTSource(fn=kernel.fn, signature=signature, constexprs=dict(kernel.constexprs), attrs=attrs)
    options = {"num_warps": kernel.num_warps, "enable_fp_fusion": False, **kernel.options}
    if target == "gfx942":
        options.pop("maxnreg", None)
    return triton.compile(source, target=TARGETS[target], options=options)


def report(kernel: Kernel, target: str) -> Report:
    """Compile for a target and return its resources."""
    made = compiled(kernel, target)
    if target == "gfx942":
        text = made.asm["amdgcn"]
        registers, spilled = (
            int(re.search(rf"\.{key}:\s+(\d+)", text)[1]) for key in ("vgpr_count", "vgpr_spill_count")
        )
        return Report(registers, spilled, made.metadata.shared, 0, 0.0, 0, ())
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        sass = _run("nvdisasm", "-c", file.name)
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", sass, re.MULTILINE)
    code = [line for line in lines if not line.startswith(("NOP", "BRA `(.L_x"))]
    spilled = found["STACK"] + found["LOCAL"] + sum("LDL" in line or "STL" in line for line in code)
    threads = 32 * kernel.num_warps
    ptx = made.asm["ptx"]
    return Report(
        found["REG"],
        spilled,
        made.metadata.shared,
        len(code),
        round(len(code) * threads / kernel.elements, 1),
        sum("LDG" in line and ".128" in line for line in code),
        tuple(name for name in INEXACT if name in ptx),
    )


def check(kernel: Kernel, target: str) -> Report:
    """Assert that the kernel fits: no spills, registers and instructions within limits, exact arithmetic."""
    found = report(kernel, target)
    assert found.spilled == 0, f"{kernel.name}: spills on {target}: {found}"
    assert found.registers <= (256 if target == "gfx942" else MOST_REGISTERS), f"{kernel.name}: {found}"
    assert not found.inexact, f"{kernel.name}: inexact arithmetic on {target}: {found.inexact}"
    if target != "gfx942" and kernel.wide:
        assert found.wide_loads, f"{kernel.name}: no 128-bit loads on {target}: {found}"
    if target == "sm_90" and kernel.most is not None:
        assert found.per_element <= kernel.most, f"{kernel.name}: {found.per_element} > {kernel.most}"
    return found


def catalogue() -> list[Kernel]:
    """Return the kernels that the test files list."""
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    modules = [importlib.import_module(f"tests.triton.{file.stem}") for file in files]
    return [kernel for module in modules for kernel in getattr(module, "KERNELS", ())]


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], check=True, capture_output=True, text=True).stdout


def write(path: Path, targets: Sequence[str] = ("sm_80", "sm_90", "gfx942")) -> None:
    """Store the resources of all listed kernels, for docs/kernels.md."""
    rows = [{"kernel": each.name, **{at: asdict(report(each, at)) for at in targets}} for each in catalogue()]
    path.write_text(json.dumps({"triton": triton.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    write(Path(__file__).with_name("kernels.json"))
