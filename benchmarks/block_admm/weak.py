"""Weak labels: a net learns whether a digit is odd; the digit is read from the code of its hidden layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laconic.admm import DeepFacto
from laconic.tools.tasks.mnist import inputs

LABELLED, RIDGE = 1000, 0.01  # images whose digit is known, and the penalty of the readout
FITTING = 2000  # mini-batches of a factorisation that is fitted to a trained net


def coarse(y: Tensor) -> Tensor:
    """Return the weak labels: 1 where a digit is odd."""
    return y % 2


@torch.no_grad()
def digits_wrong(model: nn.Sequential, data: dict[str, Tensor], rank: int, batch: int) -> dict[str, float]:
    """Return the percentage of test digits that a linear readout gets wrong.

    `code`: from the code of the model's DeepFacto layer, or of one that is fitted to the outputs of the first
    layer of a model without; `hidden`: from these outputs.
    """
    children = [*model.children()]
    at = next((i for i, child in enumerate(children) if isinstance(child, DeepFacto)), 3)
    below = nn.Sequential(*children[:at])
    hidden = {part: below(inputs(data[f"{part}_x"], None)) for part in ("train", "test")}
    facto = children[at]
    if not isinstance(facto, DeepFacto):
        facto = DeepFacto(hidden["train"].shape[1], rank)
        for rows in hidden["train"][: FITTING * batch].split(batch):
            facto.learn(rows)
    codes = {part: facto.code(hidden[part]) for part in hidden}
    return {name: wrong(each, data) for name, each in (("code", codes), ("hidden", hidden))}


def wrong(features: dict[str, Tensor], data: dict[str, Tensor]) -> float:
    """Return the percentage of wrong digits by a readout of these features, fitted to LABELLED images."""
    weights = readout(features["train"][:LABELLED], data["train_y"][:LABELLED])
    found = with_one(features["test"]) @ weights
    return 100 * float((found.argmax(1) != data["test_y"]).double().mean())


def readout(features: Tensor, y: Tensor) -> Tensor:
    """Return float64 (features + 1, classes): ridge regression of the classes; its penalty is per feature."""
    x, classes = with_one(features), nn.functional.one_hot(y.long()).double()
    gram = x.T @ x
    return torch.linalg.solve(gram + RIDGE * torch.diag(gram.diagonal().clamp(min=1e-8)), x.T @ classes)


def with_one(features: Tensor) -> Tensor:
    return torch.cat([features.double(), torch.ones(len(features), 1, dtype=torch.float64)], 1)
