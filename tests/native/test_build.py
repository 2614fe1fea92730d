"""Where nothing can be compiled, the package still builds, as a pure wheel, and runs on the reference."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path.insert(0, sys.argv[1])
import laconic
from laconic import kernels
print(laconic.__file__.startswith(sys.argv[1]), kernels.info()["live"], kernels.info()["missing"])
"""


@pytest.mark.skipif(find_spec("scikit_build_core") is None, reason="scikit-build-core is not installed")
def test_without_a_compiler_the_wheel_is_pure_and_works(tmp_path: Path) -> None:
    source, wheels, home = tmp_path / "source", tmp_path / "wheels", tmp_path / "home"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md"):
        shutil.copy(ROOT / name, source / name)
    broken = {**os.environ, "CXX": shutil.which("false") or "/bin/false"}
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(wheels),
        str(source),
    ]
    done = subprocess.run(build, env=broken, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = wheels.iterdir()
    assert wheel.name.endswith("py3-none-any.whl")
    zipfile.ZipFile(wheel).extractall(home)
    ran = subprocess.run([sys.executable, "-c", CHECK, str(home)], capture_output=True, text=True)
    assert ran.stdout.strip() == "True reference No module named 'laconic._native'", ran.stderr
