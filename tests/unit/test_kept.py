"""`keep=` of the conversions: the same words everywhere."""

from __future__ import annotations

import pytest
import torch
from tests.unit.shared import for_each
from torch import nn

from laconic.core.errors import AttachError
from laconic.lowbit import admm, binarise, convert, quantise, straight_through
from laconic.sparsity import rigl, swat
from laconic.transforms.keep import is_kept


def net() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), nn.Linear(4, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


CONVERSIONS = {
    "convert": convert,
    "binarise": binarise,
    "quantise": quantise,
    "admm": lambda model, keep: admm(model, sgd(model), keep=keep),
    "straight_through": lambda model, keep: straight_through(model, sgd(model), keep=keep),
    "swat": swat,
    "rigl": lambda model, keep: rigl(model, sgd(model), steps=9, keep=keep),
}


@for_each("name", CONVERSIONS)
def test_a_single_string_is_refused_and_not_split_into_letters(name: str) -> None:
    model = net()
    for keep in ("0", "0.0", "head"):
        with pytest.raises(AttachError, match=rf"keep takes a collection .* keep=\({keep!r},\)"):
            CONVERSIONS[name](model, keep=keep)
    CONVERSIONS[name](model, keep=["0.0"])
    assert type(model[0][0]) is nn.Linear


def test_a_name_keeps_what_is_inside() -> None:
    assert is_kept("a.b.c", ("a.b",)) and not is_kept("a.bc", ("a.b",)) and is_kept("a", ("",))
