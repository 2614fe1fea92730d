"""A model takes one treatment of its weights at a time, unless `keep=` keeps them apart."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from laconic.core.errors import AttachError
from laconic.core.mask import mask_of
from laconic.lowbit import admm, binarise, straight_through
from laconic.sparsity import rigl, sparsify, swat


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


KINDS = {
    "binarise": binarise,
    "admm": lambda model, keep=(): admm(model, sgd(model), "binary", keep=keep),
    "straight_through": lambda model, keep=(): straight_through(model, sgd(model), keep=keep),
    "rigl": lambda model, keep=(): rigl(model, sgd(model), 0.1, steps=9, keep=keep),
    "static_masks": lambda model, keep=(): sparsify(model, sgd(model), "static_masks()", steps=9, keep=keep),
}
PAIRS = [*product(KINDS, [*KINDS, "swat"])]
SAID = {
    "binarise": "has few bits already",
    "admm": "is drawn to a table already",
    "straight_through": "is drawn to a table already",
    "rigl": "is masked already",
    "static_masks": "is masked already",
}


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_second_treatment_is_refused_with_nothing_changed(first: str, second: str) -> None:
    model, attach = net(), (KINDS | {"swat": swat})[second]
    handle = KINDS[first](model)
    layers, weights = [*model], [each.detach().clone() for each in model.parameters()]
    masks = [mask_of(each) for each in model.parameters()]
    with pytest.raises(AttachError, match=SAID[first]):
        attach(model)
    assert [*model] == layers
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
    assert [mask_of(each) for each in model.parameters()] == masks
    handle.remove()
    attach(model)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_what_is_kept_apart_takes_both(first: str, second: str) -> None:
    model, attach = net(), (KINDS | {"swat": swat})[second]
    KINDS[first](model, keep=("0", "1", "2"))
    attach(model, keep=("3", "4", "5"))
