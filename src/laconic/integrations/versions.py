"""Tested versions of the integrations' libraries."""

from __future__ import annotations

import re
from importlib.metadata import version

from laconic.core.extras import require
from laconic.core.warning import warn

TESTED = {  # from the first version, below the second
    "accelerate": ("1.15", "1.16"),
    "lightning": ("2.6", "2.7"),
    "torchft": ("0.2", "0.3"),
    "transformers": ("5.23", "5.24"),
}


def check(library: str, use: str) -> None:
    """Warn if the installed library is outside the tested range. Raises `ExtraError` if it is missing."""
    install = f"pip install 'laconic[{library}]'"
    require(library, use, install)
    found, (lowest, end) = version(library), TESTED[library]
    if not release(lowest) <= release(found) < release(end):
        warn(
            f"{use} is tested with {library} from {lowest} and below {end}, and {found} is installed: if"
            f" it fails, {install} installs a tested version",
        )


def release(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version.

    >>> release("2.10.0rc1") > release("2.6")
    True
    """
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
