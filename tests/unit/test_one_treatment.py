"""A model takes one treatment of its weights at a time, unless `keep=` keeps them apart."""

from __future__ import annotations

from itertools import product

import torch
from tests.unit.shared import for_each, refuses, same
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
    "swat": swat,
}
PAIRS = [*product(KINDS, KINDS)]
SAID = {
    "binarise": "has few bits already",
    "admm": "is quantised to a table already",
    "straight_through": "is quantised to a table already",
    "rigl": "is masked already",
    "static_masks": "is masked already",
    "swat": "is sparse already",
}


@for_each("first, second", PAIRS)
def test_a_second_treatment_is_refused_with_nothing_changed_unless_they_are_kept_apart(first, second) -> None:
    model, attach = net(), KINDS[second]
    handle = KINDS[first](model)
    layers, weights = [*model], [part.detach().clone() for part in model.parameters()]
    masks = [mask_of(part) for part in model.parameters()]
    refuses(AttachError, SAID[first], attach, model)
    assert [*model] == layers
    assert same(model.parameters(), weights)
    assert [mask_of(part) for part in model.parameters()] == masks
    handle.remove()
    attach(model)
    both = net()
    KINDS[first](both, keep=("0", "1", "2"))
    attach(both, keep=("3", "4", "5"))
