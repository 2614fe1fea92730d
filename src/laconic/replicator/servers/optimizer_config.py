"""An optimiser in words: its class, its settings and its tensors, so that a server can build its share."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.core.errors import AttachError
from laconic.core.layout import Entry, Layout

SILENT = ("params", "param_names")  # what a group holds beside its settings
PLAIN = (bool, int, float, str, type(None))


def described(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """The class, and each group's settings and names of tensors. Raises `AttachError` if words fail."""
    kind = type(optimizer)
    if "<locals>" in kind.__qualname__:
        raise AttachError(
            f"{kind.__qualname__} is defined inside a function, and servers build the optimiser anew by its"
            " name: define its class at the top of a module"
        )
    if optimizer.state:
        raise AttachError(
            f"this {kind.__name__} has a state already, and the servers' begins empty: wrap it before its"
            " first step; Replicator(checkpoints=folder) keeps the servers' state"
        )
    members = [[names[each] for each in group["params"] if each in names] for group in optimizer.param_groups]
    return {"class": [kind.__module__, kind.__qualname__], "groups": settings(optimizer), "members": members}


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What each group is set to now. Raises `AttachError` for a setting that is no number, word or list."""
    return [
        {key: _plain(key, value) for key, value in group.items() if key not in SILENT}
        for group in optimizer.param_groups
    ]


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(key, each) for each in value]
    if not isinstance(value, PLAIN):
        raise AttachError(
            f"servers are told an optimiser's settings as numbers and words, and {key} is {value!r}"
        )
    return value


def built(told: Mapping[str, Any], layout: Layout, flat: Tensor) -> tuple[Optimizer, dict[str, nn.Parameter]]:
    """The optimiser of these words, and its parameters by name: the tensors of flat float32 (n,).

    Raises `AttachError` if there is no such class here, or it takes other arguments than its groups hold.
    """
    module, name = told["class"]
    try:
        kind: Any = importlib.import_module(module)
        for part in name.split("."):
            kind = getattr(kind, part)
    except (ImportError, AttributeError) as error:
        raise AttachError(f"there is no {module}.{name} on the server: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise AttachError(f"{module}.{name} is no optimiser")
    parts = {entry.name: nn.Parameter(view(flat, entry)) for entry in layout}
    groups = [
        {"params": [parts[each] for each in members if each in parts], **group}
        for members, group in zip(told["members"], told["groups"], strict=True)
    ]
    needed = {
        each.name: groups[0][each.name]
        for each in list(inspect.signature(kind).parameters.values())[1:]
        if each.default is inspect.Parameter.empty and each.name in groups[0]
    }
    try:
        return kind(groups, **needed), parts
    except (TypeError, ValueError) as error:
        raise AttachError(
            f"{module}.{name} cannot be built from the settings of its groups: {error}"
        ) from error


def view(flat: Tensor, entry: Entry) -> Tensor:
    """A tensor's part of flat (n,), in its shape."""
    return flat[entry.offset : entry.offset + entry.numel].view(entry.shape)


def dealt(sizes: Sequence[int], servers: int) -> list[int]:
    """The server of each tensor: the largest first, each to the server that has least so far.

    Whole tensors, as optimisers such as LARS look at the norms of whole ones.

    >>> dealt([10, 500, 20, 480], servers=2)
    [0, 0, 1, 1]
    """
    loads, home = [0] * servers, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        home[i] = min(range(servers), key=lambda server: loads[server])
        loads[home[i]] += sizes[i]
    return home
