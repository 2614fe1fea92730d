"""Starts a program of this package without `import laconic`, which imports torch and takes seconds."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
START = """
import runpy, sys, types
home, name, *sys.argv[1:] = sys.argv[1:]
for package in ("", ".tools", ".tools.lab"):
    folder = home + package.replace(".", "/")
    package = "laconic" + package
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = [folder]
runpy.run_module(name, run_name="__main__", alter_sys=True)
"""


def bare(program: str, *arguments: object) -> list[str]:
    module = f"laconic.tools.lab.inside.{program}"
    return [sys.executable, "-I", "-S", "-c", START, str(PACKAGE), module, *map(str, arguments)]
