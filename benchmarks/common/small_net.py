"""Nets whose step takes milliseconds, on CIFAR-10, MNIST and Shakespeare, and nets of the tasks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

from benchmarks.common.workers import Data, Problem
from laconic.exchange.method import Method
from laconic.strategies.several import as_one
from laconic.strategies.strategy import Strategy
from laconic.tools.tasks.cifar10 import CIFAR10, inputs
from laconic.tools.tasks.mnist import inputs as digits
from laconic.tools.tasks.shakespeare import GPT, SHAKESPEARE
from laconic.tools.tasks.shakespeare import load as load_text
from laconic.tools.tasks.task import Recipe

CNN_RECIPE, RNN_RECIPE = CIFAR10.models["cnn"], SHAKESPEARE.models["lstm"]
WINDOWS = 256  # of the text's last tenth, evenly apart: the GPT's test


def net() -> nn.Module:
    """Three convolutions and two dense layers, 50,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 48, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(768, 40),
        nn.ReLU(),
        nn.Linear(40, 10),
    )


def digit_net() -> nn.Module:
    """Two convolutions and two dense layers, 52,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(784, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def image_loss(model: nn.Module, x: Tensor, y: Tensor, draws: torch.Generator) -> Tensor:
    """Return the loss of images, cropped and flipped at random."""
    return F.cross_entropy(model(inputs(x, draws)), y.long())


def image_test(model: nn.Module, x: Tensor, y: Tensor) -> tuple[int, int, float]:
    """Return hits, examples and the sum of losses of images, without augmentation."""
    out, y = torch.cat([model(inputs(each, None)) for each in x.split(500)]), y.long()
    return int((out.argmax(1) == y).sum()), len(y), float(F.cross_entropy(out, y, reduction="sum"))


def normalised_test(model: nn.Module, x: Tensor, y: Tensor) -> tuple[int, int, float]:
    """Return the same, with the running averages of batch norms."""
    return image_test(model.eval(), x, y)


def digit_loss(model: nn.Module, x: Tensor, y: Tensor, draws: torch.Generator) -> Tensor:
    """Return the loss of digits, without augmentation."""
    return F.cross_entropy(model(digits(x, None)), y.long())


def digit_test(model: nn.Module, x: Tensor, y: Tensor) -> tuple[int, int, float]:
    """Return hits, examples and the sum of losses of digits."""
    out, y = torch.cat([model(digits(each, None)) for each in x.split(500)]), y.long()
    return int((out.argmax(1) == y).sum()), len(y), float(F.cross_entropy(out, y, reduction="sum"))


def sgd(model: nn.Module, lr: float, by: Method | Strategy) -> Optimizer:
    """SGD with momentum 0.9, or the optimiser that the method needs."""
    return Recipe(net, lr, nesterov=False, weight_decay=0.0).optimizer(model, lr, by)


def plain_sgd(model: nn.Module, lr: float, by: Method | Strategy) -> Optimizer:
    """SGD without momentum."""
    return SGD(model.parameters(), lr=lr)


def letter_loss(model: nn.Module, x: Tensor, y: Tensor, draws: torch.Generator) -> Tensor:
    """Return the loss of the next letters, in bf16 autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return float_loss(model, x, y, draws)


def float_loss(model: nn.Module, x: Tensor, y: Tensor, draws: torch.Generator) -> Tensor:
    """Return the loss of the next letters, in float32."""
    return F.cross_entropy(model(x.long()).flatten(0, 1), y.long().flatten())


def letter_test(model: nn.Module, x: Tensor, y: Tensor) -> tuple[int, int, float]:
    """Return hits, letters and the sum of losses, in float32."""
    out, y = model(x.long()).flatten(0, 1), y.long().flatten()
    return int((out.argmax(1) == y).sum()), len(y), float(F.cross_entropy(out, y, reduction="sum"))


def adamw(model: nn.Module, lr: float, by: Method | Strategy) -> Optimizer:
    """AdamW without decay, or the optimiser that the method needs."""
    for rule in by.rules if isinstance(by, Method) else ():
        made = rule.make([*model.parameters()], lr=lr, weight_decay=0.0)
        if made is not None:
            return made
    return AdamW(model.parameters(), lr=lr, weight_decay=0.0)


def muon(model: nn.Module, lr: float, by: Method | Strategy) -> Optimizer:
    """Muon without Nesterov's correction for the matrices inside layers, AdamW for the rest."""
    inside = {p: None for name, p in model.named_parameters() if name.startswith("layers.") and p.dim() == 2}
    rest = [p for p in model.parameters() if p not in inside]
    matrices = Muon([*inside], lr=lr, weight_decay=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw")
    return as_one([matrices, AdamW(rest, lr=lr, weight_decay=0.0)])


def signs(model: nn.Module, lr: float, by: Method | Strategy) -> Optimizer:
    """Return an optimiser that steps by signs, as DeMo was published."""
    return Adam(model.parameters(), lr=lr, betas=(0.0, 0.0))


def load_windows() -> Data:
    """Return the text, and WINDOWS windows of its last tenth."""
    data = dict(load_text())
    every = len(data["test_x"]) // WINDOWS
    for name in ("test_x", "test_y"):
        data[name] = data[name][::every][:WINDOWS]
    return data


SMALL_NET = Problem(net, 16, image_loss, image_test, sgd)
WITHOUT_MOMENTUM = Problem(net, 16, image_loss, image_test, plain_sgd)
DIGIT_NET = Problem(digit_net, 16, digit_loss, digit_test, sgd)
CNN = Problem(CNN_RECIPE.build, CIFAR10.batch, image_loss, normalised_test, CNN_RECIPE.optimizer)
RNN = Problem(RNN_RECIPE.build, SHAKESPEARE.batch, float_loss, letter_test, RNN_RECIPE.optimizer)
SMALL_GPT = Problem(GPT, 8, letter_loss, letter_test, adamw)
BY_MUON = Problem(GPT, 8, letter_loss, letter_test, muon)
BY_SIGNS = Problem(GPT, 8, letter_loss, letter_test, signs)
