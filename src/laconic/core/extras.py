"""Optional packages, installed by extras."""

from __future__ import annotations

from importlib.util import find_spec

from laconic.core.errors import ExtraError

INSTALL_TRAIN = "pip install 'laconic[train]'"
INSTALL_FEDERATED = "pip install 'laconic[federated]'"


def require(module: str, use: str, install: str = INSTALL_TRAIN) -> None:
    """Check that a module can be imported, without importing it.

    Args:
        module: The import name, such as "plotly".
        use: The feature that needs it.
        install: The command that installs it.

    Raises:
        ExtraError: The module is not installed.

    >>> require("no_such_module", "the report")
    Traceback (most recent call last):
    ...
    laconic.core.errors.ExtraError: the report needs no_such_module: pip install 'laconic[train]'
    """
    if find_spec(module) is None:
        raise ExtraError(f"{use} needs {module}: {install}")
