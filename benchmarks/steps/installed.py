"""Peers from PyPI, in a virtual environment of their own that sees what is installed here, torch too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

PACKAGES = ("decent-dp==0.2.3", "hivemind==1.1.12", "numpy==1.26.4")  # hivemind fails with numpy 2.4
TAKES_S = 300


def folder() -> Path:
    """Where the packages are, or will be: to be put on PYTHONPATH."""
    return within(environment())


def environment() -> Path:
    """The virtual environment."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "laconic" / "peers" / "-".join(PACKAGES).replace("==", "-")


def within(home: Path) -> Path:
    """The folder of packages of a virtual environment."""
    return Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))


def install() -> str | None:
    """Fetch the packages, once. Why they are not there, or None."""
    to = environment()
    if to.exists():
        return None
    new = to.with_name(f"{to.name}.{os.getpid()}")
    try:
        fill(new)
        new.rename(to)
    except subprocess.CalledProcessError as error:
        return f"pip could not install {' '.join(PACKAGES)}: {(error.stderr.splitlines() or ['?'])[-1]}"
    except subprocess.TimeoutExpired:
        return f"pip did not install {' '.join(PACKAGES)} within {TAKES_S} s"
    except OSError as error:  # another has made it meanwhile, unless it cannot be made at all
        return None if to.exists() else f"no virtual environment in {to.parent}: {error}"
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return None


def fill(home: Path) -> None:
    """A virtual environment with the packages, and with what they need that is not here."""
    venv.create(home, with_pip=True)
    (within(home) / "here.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    python = home / Path(sys.executable).relative_to(sys.prefix)
    command = [python, "-m", "pip", "install", "--quiet", *PACKAGES]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=TAKES_S)
