"""Peers from PyPI, fetched into a folder of their own: what they need beside torch, and nothing of torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PACKAGES = ("decent-dp==0.2.3", "loguru==0.7.3")
TAKES_S = 120


def folder() -> Path:
    """Where the packages are, or will be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "laconic" / "peers" / "-".join(PACKAGES).replace("==", "-")


def install() -> str | None:
    """Fetch the packages, once. Why they are not there, or None."""
    to = folder()
    if to.exists():
        return None
    new = to.with_name(to.name + ".new")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(new),
        *PACKAGES,
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TAKES_S)
    except subprocess.CalledProcessError as error:
        return f"pip could not install {' '.join(PACKAGES)}: {(error.stderr.splitlines() or ['?'])[-1]}"
    except subprocess.TimeoutExpired:
        return f"pip did not install {' '.join(PACKAGES)} within {TAKES_S} s"
    new.rename(to)
    return None
