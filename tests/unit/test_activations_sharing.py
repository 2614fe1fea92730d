"""Views of one storage: one coding for all that hold the same elements, and each comes back as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tests.unit.shared import for_each
from tests.unit.test_activations import keeping
from torch import Tensor, nn

import laconic

Run = Callable[[nn.ModuleList, Tensor], Tensor]
SPECS = ["comet(norms='exact')", "blocks(bits=8, norms='exact')"]


def conv(channels: int = 4) -> nn.Conv2d:
    return nn.Conv2d(channels, 3, 3, padding=1)


IMAGES, ROWS = (6, 4, 8, 8), (8, 8)
TWO = [nn.Linear(8, 8), nn.Linear(8, 8)]
CASES: dict[str, tuple[list[nn.Module], tuple[int, ...], Run]] = {
    "a ReLU flattened": ([conv(), nn.Linear(192, 5)], IMAGES, lambda m, x: m[1](F.relu(m[0](x)).flatten(1))),
    "a ReLU viewed": ([TWO[0], nn.Linear(32, 2)], (6, 4, 8), lambda m, x: m[1](F.relu(m[0](x)).view(6, 32))),
    "a convolution and a linear head": (
        [conv(), nn.Linear(4 * 64, 5)],
        IMAGES,
        lambda m, x: torch.cat([m[0](x).flatten(1), m[1](x.flatten(1))], 1),
    ),
    "height and width exchanged": ([conv(), conv()], IMAGES, lambda m, x: m[0](x) + m[1](x.transpose(2, 3))),
    "a square matrix and its transpose": (TWO, ROWS, lambda m, x: m[0](x) + m[1](x.t())),
    "half and every second row": (TWO, ROWS, lambda m, x: m[0](x[:4]) + m[1](x[::2])),
    "channels": ([conv(2), conv(2)], IMAGES, lambda m, x: m[0](x[:, :2]) + m[1](x[:, ::2])),
    "a matrix and its negative view": (TWO, ROWS, lambda m, x: m[0](x) + m[1](torch._neg_view(x))),
}


def grads(layers: nn.ModuleList, x: Tensor, run: Run, spec: str | None) -> list[Tensor]:
    layers, x = copy.deepcopy(layers), x.clone().requires_grad_()
    given = torch.tanh(x)
    with keeping(layers, spec):
        out = run(layers, given)
    out.square().sum().backward()
    found = [x.grad, *(p.grad for p in layers.parameters())]
    return [each for each in found if each is not None]


@for_each("spec", SPECS)
@for_each("case", CASES)
def test_each_view_comes_back_in_its_own_shape_and_order(case: str, spec: str) -> None:
    """Gradients of the input and of biases are those of dense, bit by bit; of weights, within 2 %."""
    torch.manual_seed(0)
    modules, shape, run = CASES[case]
    layers, x = nn.ModuleList(modules), torch.randn(shape)
    exact, lossy = grads(layers, x, run, None), grads(layers, x, run, spec)
    assert torch.equal(exact[0], lossy[0])
    for one, other in zip(exact[1:], lossy[1:], strict=True):
        assert one.dim() > 1 or torch.equal(one, other)
        assert float((one - other).norm()) < 0.02 * float(one.norm())


class Heads(nn.Module):
    """Two layers that read one tensor, the second as `view` makes it."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.view, self.first, self.second = view, nn.Linear(64, 4), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).sum() + self.second(self.view(x)).sum()


def test_views_with_the_same_elements_share_one_coding() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    alone, shared, apart = (
        laconic.activations.measure(model, x).kept
        for model in (nn.Linear(64, 4), Heads(lambda x: x.view(8, 8, 64)), Heads(lambda x: x.t()))
    )
    assert shared == alone
    assert apart > 1.5 * alone


def test_a_relu_before_a_flattened_input_costs_nothing() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    kept = laconic.activations.measure(model, torch.randn(4, 3, 8, 8))
    assert {row.name: row.kept for row in kept.rows}["0 > relu"] == 0


def test_an_input_that_is_changed_in_place_is_coded_anew() -> None:
    for spec in SPECS:
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        model, before = Heads(lambda x: x.mul_(-3.0)), x.sum(0)
        with laconic.activations.compress(model, spec):
            out = model(x)
        out.backward()
        for layer, exact in ((model.first, before), (model.second, -3.0 * before)):
            assert layer.weight.grad is not None
            error = (layer.weight.grad - exact).norm() / layer.weight.grad.norm()
            assert float(error) < 0.02, f"{spec}: {error}"
