"""A model becomes its low-bit form, learns in it, and goes on with the same bits; what cannot is refused."""

from __future__ import annotations

import copy
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from tests.unit.shared import for_each, refuses, resumed, same
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from laconic.core.errors import AttachError, SpecError
from laconic.lowbit import (
    Add,
    EvoNormS0,
    QuantAdd,
    QuantConv2d,
    QuantLinear,
    RangeEvoNorm,
    RangeGroupNorm,
    RangeNorm,
    convert,
)
from laconic.tools.tasks import TASKS, find


class Residual(nn.Module):
    """A block with all that there is a low-bit form of."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.evonorm = EvoNormS0(8)
        self.add = Add()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.add(x, self.evonorm(self.norm(self.conv(x))))
        return y


def net() -> nn.Module:
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3))
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), Residual(), head)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Images that are brighter in one of three rows, (n, 1, 8, 8), and which."""
    rng = torch.Generator().manual_seed(step)
    y = torch.randint(0, 3, (16,), generator=rng)
    x = torch.randn(16, 1, 8, 8, generator=rng)
    x[torch.arange(16), 0, 2 * y + 1] += 2.0
    return x, y


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def test_every_layer_gets_its_form_and_the_model_is_left_as_it_was() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    made = convert(model)
    kinds = [type(module) for module in made.modules()]
    for kind in (QuantConv2d, RangeGroupNorm, RangeNorm, RangeEvoNorm, QuantAdd, QuantLinear, nn.ReLU):
        assert kind in kinds
    assert not {nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.GroupNorm, EvoNormS0, Add} & set(kinds)
    for module in made.modules():
        assert not isinstance(module, QuantConv2d | QuantLinear) or module.precision.bits == 8
    assert {type(module) for module in model.modules()} >= {nn.Conv2d, nn.Linear, Add}
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    own, theirs = dict(made.named_parameters()), dict(model.named_parameters())
    assert own.keys() == theirs.keys() and all(torch.equal(own[name], theirs[name]) for name in own)
    assert all(own[name] is not theirs[name] for name in own)


def test_eight_bits_compute_about_what_32_do() -> None:
    """Without norms by range, whose scale is another one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3)).eval()
    x, _ = batch(0)
    exact = model(x).detach()
    errors = [
        float((convert(model, bits)(x) - exact).detach().norm() / exact.norm().detach()) for bits in (8, 4, 2)
    ]
    assert errors[0] < 0.05 * float(exact.norm()) < errors[1] < errors[2]  # what stands out is cut off


@for_each("bits, reached", [(8, 0.35), (4, 0.7)])
def test_a_low_bit_model_learns(bits: int, reached: float) -> None:
    model = convert(net(), bits, seed=1)
    losses = train(model, sgd(model), range(40))
    assert sum(losses[-10:]) / 10 < reached < losses[0]
    model.eval()
    x, y = batch(99)
    assert float((model(x).argmax(1) == y).float().mean()) > 0.7


def test_a_resumed_training_has_the_same_bits_and_another_seed_has_others() -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = convert(net(), seed=5)
        return model, sgd(model)

    (whole, _), (second, _) = resumed(start, lambda parts, steps: train(*parts, steps), 5, 8)
    assert same(whole.state_dict().values(), second.state_dict().values())
    other = convert(net(), seed=6)
    train(other, sgd(other), range(8))
    assert any(not torch.equal(a, b) for a, b in zip(whole.parameters(), other.parameters(), strict=True))


def test_layers_draw_bits_of_their_own() -> None:
    model = convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    seeds = {module.precision.seed for module in model if isinstance(module, QuantLinear)}
    assert len(seeds) == 2


def test_a_module_that_is_there_twice_stays_one() -> None:
    conv = nn.Conv2d(1, 1, 1)
    made = convert(nn.Sequential(conv, nn.ReLU(), conv))
    assert isinstance(made[0], QuantConv2d) and made[0] is made[2]  # type: ignore[index]


def test_what_is_kept_stays_in_float32() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    made = convert(model, keep=["1"])
    kinds = [type(module) for module in made.modules()]
    assert kinds.count(QuantLinear) == 1 and kinds.count(nn.Linear) == 1 and nn.LayerNorm in kinds


def hooked() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda module, args, out: out)
    return nn.Sequential(layer)


def pruned() -> nn.Module:
    return nn.Sequential(prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5))


@for_each(
    "model, words",
    [
        (nn.Sequential(nn.LSTM(3, 4)), "'0' is a LSTM with a parameter 'weight_ih_l0'"),
        (nn.Sequential(nn.LSTM(3, 4)), "keep it in float32 with keep=('0',)"),
        (nn.Sequential(nn.Conv1d(3, 4, 1)), "only Conv2d, Linear, BatchNorm2d"),
        (nn.LayerNorm(4), "this model is a LayerNorm"),
        (
            nn.Sequential(nn.Conv2d(1, 1, 3, padding="same")),
            "'0': padding of a low-bit convolution must be a number",
        ),
        (nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")), "nn.ReflectionPad2d"),
        (nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False)), "use GroupNorm"),
        (hooked(), "add them after convert()"),
        (pruned(), "'0.weight' is computed from parameters, and such a tensor cannot be copied: remove"),
        (convert(nn.Sequential(nn.Linear(2, 2))), "'0' is a QuantLinear"),
    ],
)
def test_what_has_no_low_bit_form_is_refused(model: nn.Module, words: str) -> None:
    refuses(AttachError, re.escape(words), convert, model)


@for_each("dtype", [torch.float64, torch.bfloat16])
def test_a_model_that_is_not_float32_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(AttachError, match=r"'0' is torch\..*: call model\.float\(\)"):
        convert(nn.Sequential(nn.Linear(2, 2)).to(dtype))


def test_wrong_arguments_are_refused() -> None:
    refuses(SpecError, "bits must be a whole number in", lambda: convert(net(), bits=16))
    refuses(AttachError, r"no module '4\.3': did you mean '4\.2'", lambda: convert(net(), keep=["4.3"]))


@for_each("name, model", [(task.name, model) for task in TASKS.values() for model in task.models])
def test_the_models_of_images_have_a_low_bit_form_and_those_of_text_have_none(name: str, model: str) -> None:
    built = find(name).recipe(model).build()
    if name == "shakespeare":
        refuses(AttachError, "with a parameter", convert, built)
    elif model == "bnn":  # few bits are for it: it has BatchNorm1d
        refuses(AttachError, "BatchNorm1d with a parameter", convert, built)
    else:
        convert(built)


@for_each("reentrant", [False, True])
def test_checkpointing_repeats_a_batch_and_does_not_count_it(reentrant: bool) -> None:
    """Same random bits, running ends and statistics as without it, for a block that is called twice."""
    torch.manual_seed(0)
    net = convert(Residual(), 4, rounding="stochastic")
    plain, x = copy.deepcopy(net), torch.randn(4, 8, 6, 6, requires_grad=True)
    for call in (functools.partial(checkpoint, net, use_reentrant=reentrant), plain):
        call(call(x)).square().sum().backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad)
    assert same(net.buffers(), plain.buffers())
