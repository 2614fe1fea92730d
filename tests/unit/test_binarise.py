"""Binarised and quantised layers: their equations by brute force, clipping, and what cannot be treated."""

from __future__ import annotations

import copy
import functools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from tests.unit.shared import for_each, refuses, resumed, same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from laconic.core.errors import AttachError, SpecError, StateError
from laconic.lowbit import (
    FewBitConv2d,
    FewBitGRUCell,
    FewBitLinear,
    FewBitLSTMCell,
    ShiftBatchNorm,
    binarise,
    quantise,
)
from laconic.lowbit.levels import integers, logarithmic
from laconic.lowbit.log_gradient import quantise_gradient


def sign(value: float) -> float:
    return 1.0 if value >= 0 else -1.0


def mlp(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(width) for _ in range(3)]
    inner = nn.Linear(5, width), norms[0], nn.Linear(width, width), norms[1]
    return nn.Sequential(*inner, nn.Linear(width, width, bias=False), norms[2], nn.Linear(width, 3))


def test_gradients_pass_the_signs_where_a_hard_tanh_would_let_them() -> None:
    """Every entry of dx, dw and db of one layer, from loops over the equations."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 3))
    binarise(net, first="binary", last="binary")
    net.double()
    layer = net[0]
    with torch.no_grad():
        layer.weight.uniform_(-1.5, 1.5)  # beyond what a step leaves: those have no gradient
        layer.weight[0, 0], layer.weight[1, 1] = 0.0, 1.0
    x = torch.empty(6, 4, dtype=torch.float64).uniform_(-2, 2)
    x[0, 0], x[1, 1], x[2, 2] = 0.0, 1.0, -1.0
    x.requires_grad_()
    dy = torch.randn(6, 3, dtype=torch.float64)
    y = layer(x)
    y.backward(dy)
    w = layer.weight
    for b in range(6):
        for o in range(3):
            total = sum(sign(w[o, i]) * sign(x[b, i]) for i in range(4))
            assert y[b, o].item() == total + layer.bias[o].item()
        for i in range(4):
            back = sum(dy[b, o].item() * sign(w[o, i]) for o in range(3)) * bool(abs(x[b, i]) <= 1)
            assert x.grad[b, i].item() == pytest.approx(back, abs=1e-12)
    for o in range(3):
        assert layer.bias.grad[o].item() == pytest.approx(dy[:, o].sum().item(), abs=1e-12)
        for i in range(4):
            back = sum(dy[b, o].item() * sign(x[b, i]) for b in range(6)) * bool(abs(w[o, i]) <= 1)
            assert w.grad[o, i].item() == pytest.approx(back, abs=1e-12)


@for_each("bits", [1, 2, 3, 8])
def test_linear_levels_lie_evenly_and_the_nearest_is_taken(bits: int) -> None:
    top = 2**bits - 1
    x = torch.linspace(-1.4, 1.4, 1999, dtype=torch.float64)
    found = integers(x, bits)
    levels = [2 * u - top for u in range(top + 1)]
    for value, got in zip(x.tolist(), found.tolist(), strict=True):
        assert got in levels
        assert abs(got / top - value) <= min(abs(level / top - value) for level in levels) + 1e-12
    assert integers(torch.zeros(1), bits).item() == 1, "zero lies between two levels: the upper one"


def test_one_bit_is_the_sign_down_to_the_least_number() -> None:
    x = torch.tensor([1e-45, -1e-45, -1e-9, 0.0, -0.0, math.inf, -math.inf])
    assert integers(x, 1).tolist() == [1, -1, -1, 1, 1, 1, -1]
    assert torch.equal(integers(x, 1), logarithmic(x, 1))


@for_each("bits", [2, 4])
def test_logarithmic_levels_are_powers_of_two(bits: int) -> None:
    for value in (0.9, 0.7, -0.72, 0.3, -0.01, 1e-9, -3.0):
        exponent = min(0, max(1 - 2 ** (bits - 1), round(math.log2(abs(value)))))
        assert logarithmic(torch.tensor([value]), bits).item() == sign(value) * 2**exponent


@for_each("levels", [lambda x: integers(x, 2) / 3, lambda x: logarithmic(x, 3)])
def test_levels_have_the_gradient_of_a_hard_tanh(levels) -> None:
    x = torch.tensor([-1.01, -1.0, -0.2, 0.0, 0.9, 1.0, 1.5], requires_grad=True)
    levels(x).backward(torch.arange(1.0, 8.0))
    assert torch.allclose(x.grad, torch.tensor([0.0, 2, 3, 4, 5, 6, 0]))


def test_drawn_signs_have_the_mean_of_what_they_stand_for() -> None:
    """200,000 draws of 7 numbers: sigma of a mean is at most 1 / sqrt(200,000) = 0.0022; five of them."""
    values = torch.tensor([-1.5, -1.0, -0.6, 0.0, 0.1, 0.8, 2.0])
    drawn = integers(values.repeat(200_000), 1, key=5).view(-1, 7)
    assert set(drawn.unique().tolist()) == {-1, 1}
    assert torch.allclose(drawn.mean(0), values.clamp(-1, 1), atol=0.0112)
    assert torch.equal(drawn, integers(values.repeat(200_000), 1, key=5).view(-1, 7))


@for_each("bits", [3, 6])
@for_each("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounded_gradients_are_powers_of_two_with_the_same_mean(dtype: torch.dtype, bits: int) -> None:
    values = torch.tensor([3.0, -1.3, 0.26, 1e-3, -2e-4, 0.0, 4.0], dtype=dtype)
    rounded = quantise_gradient(values.repeat(100_000), bits, key=9)
    assert rounded.dtype == dtype
    drawn, values = rounded.float().view(-1, 7), values.float()
    levels = {0.0} | {s * 4.0 * 2.0**-i for s in (1, -1) for i in range(2 ** (bits - 1) - 1)}
    assert set(drawn.unique().tolist()) <= levels
    deviation = drawn.std(0) / math.sqrt(100_000)
    assert bool(((drawn.mean(0) - values).abs() <= 5 * deviation + 1e-7).all())
    assert torch.equal(drawn[:, 6], torch.full((100_000,), 4.0)) and not drawn[:, 5].any()


def test_gradients_that_are_not_finite_or_tiny_stay_what_they_are() -> None:
    for bad in (math.nan, math.inf):
        g = torch.tensor([1.0, bad])
        assert torch.equal(quantise_gradient(g, 6, 1).isfinite(), g.isfinite())
    assert quantise_gradient(torch.zeros(3), 6, 1).tolist() == [0, 0, 0]
    assert quantise_gradient(torch.empty(0), 6, 1).numel() == 0
    tiny = torch.tensor([1e-44, -1e-45])
    assert bool(quantise_gradient(tiny, 6, 1).isfinite().all())
    huge = torch.tensor([3e38, -1e38, 65_504.0])
    assert bool(quantise_gradient(huge[1:], 6, 1).isfinite().all())


@for_each("cell", [nn.LSTMCell, nn.GRUCell])
@for_each("bias", [True, False])
def test_a_cell_of_real_levels_is_torchs(cell, bias: bool) -> None:
    """With weights and inputs that are levels already, what is left of a cell is the cell itself."""
    torch.manual_seed(2)
    plain = cell(6, 4, bias=bias)
    with torch.no_grad():
        for name, part in plain.named_parameters():
            if name.startswith("weight"):
                part.copy_(torch.where(part >= 0, 1.0, -1.0))
    net = nn.ModuleList([copy.deepcopy(plain)])
    binarise(net, first="binary", last="binary")
    assert isinstance(net[0], FewBitLSTMCell if cell is nn.LSTMCell else FewBitGRUCell)
    for shape in ((3,), ()):
        x, h = (torch.where(torch.randn(*shape, n) >= 0, 1.0, -1.0) for n in (6, 4))
        state = (h, torch.randn(*shape, 4)) if cell is nn.LSTMCell else h
        ours, theirs = (torch.stack([*part]) for part in (net[0](x, state), plain(x, state)))
        assert torch.allclose(ours, theirs, atol=1e-6)


@for_each("cell", [nn.LSTMCell, nn.GRUCell])
def test_both_products_of_a_cell_have_gradients_in_few_bits(cell) -> None:
    torch.manual_seed(2)
    net = nn.ModuleList([cell(6, 4)])
    quantise(net, gradients=4, first="binary", last="binary")
    out = net[0](torch.randn(1, 6))
    (out if cell is nn.GRUCell else out[0]).square().sum().backward()
    for bias in (net[0].bias_ih, net[0].bias_hh):
        exponents = torch.log2(bias.grad[bias.grad != 0].abs())
        assert len(exponents) and torch.equal(exponents, exponents.round())


OPTIMISERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and torch.optim.Optimizer in kind.__mro__[1:]
}


# SparseAdam takes sparse gradients alone
@for_each("name", sorted(set(OPTIMISERS) - {"SparseAdam"}))
def test_master_weights_are_clipped_after_each_step_of_any_optimiser(name: str) -> None:
    net = mlp()
    handle = binarise(net)
    parameters = [net[2].weight, net[4].weight] if name == "Muon" else [*net.parameters()]  # matrices alone
    optimizer = OPTIMISERS[name](parameters, lr=5.0)
    before = [net.get_parameter(each).detach().clone() for each in handle.weights]
    directions = [torch.randn_like(w) for w in parameters]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((w * along).sum() for w, along in zip(parameters, directions, strict=True))
        loss.backward()
        return loss

    outside = False
    for _ in range(4):
        optimizer.step(closure)
        assert all(bool((net.get_parameter(each).abs() <= 1).all()) for each in handle.weights)
        outside |= any(bool((part.abs() > 1).any()) for part in (net[0].weight, net[6].weight))
    changed = [bool((net.get_parameter(n) != w).any()) for n, w in zip(handle.weights, before, strict=True)]
    assert all(changed), "the optimiser moves them"
    others_stay = name in ("Muon", "Adadelta", "LBFGS", "Adafactor", "Rprop", "ASGD")
    assert outside or others_stay, "other weights are not clipped"


def test_clipping_goes_with_copies_and_ends_with_remove() -> None:
    net = mlp()
    handle = binarise(net)
    for each in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        weight = each[2].weight
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=9.0).step()
        assert bool((weight == -1).all())
    handle.remove()
    weight = net[2].weight
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=9.0).step()
    assert bool((weight < -5).all()), "a plain layer is not clipped"


def test_the_model_keeps_its_parameters_and_gets_its_layers_back() -> None:
    net = mlp()
    before, parameters = [*net], [*net.parameters()]
    names = [*net.state_dict()]
    handle = binarise(net)
    assert [type(net[i]) for i in (0, 2, 4, 6)] == [nn.Linear, FewBitLinear, FewBitLinear, nn.Linear]
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    assert [*net.state_dict()] == names
    assert handle.weights == ("2.weight", "4.weight")
    handle.remove()
    handle.remove()
    assert all(a is b for a, b in zip(net, before, strict=True)) and not handle.layers
    binarise(net)


def test_first_and_last_layers_are_as_asked_for() -> None:
    net = mlp()
    handle = binarise(net, first="weights", last="binary")
    assert [*handle.layers] == ["0", "2", "4", "6"]
    x = torch.randn(3, 5)
    with torch.no_grad():
        expected = x @ torch.where(net[0].weight >= 0, 1.0, -1.0).T + net[0].bias
    assert torch.equal(net[0](x), expected), "signs of the weights, and inputs as they are"
    assert [*binarise(mlp(), first="binary").layers] == ["0", "2", "4"]
    assert [*binarise(mlp(), keep=("2",)).layers] == ["4"]
    for kept in ("0", "6"):  # which are the first and the last all the same
        assert [*binarise(mlp(), keep=(kept,)).layers] == ["2", "4"]
    real = binarise(mlp(), first="weights", keep=("0",)).layers
    assert [*real] == ["2", "4"] and real["2"].rounding.bits.activations == 1


def test_flips_are_the_share_of_signs_that_changed() -> None:
    net = mlp()
    handle = binarise(net)
    assert handle.flips() == 0
    with torch.no_grad():
        net[2].weight[0, :4] *= -1
    assert handle.flips() == 4 / 128
    assert handle.flips() == 0
    with torch.no_grad():
        net[4].weight.neg_()
    assert handle.flips() == 0.5


@for_each("make", [lambda net: binarise(net, stochastic=True), lambda net: quantise(net)])
def test_a_resumed_training_has_the_same_bits(make) -> None:
    x, y = torch.randn(32, 5), torch.randint(0, 3, (32,))

    def start(without: bool = False) -> list:
        net = mlp()
        handle, optimizer = make(net), torch.optim.Adam(net.parameters(), lr=0.05)
        return [net, optimizer] if without else [net, optimizer, handle]

    def train(parts: list, steps: range) -> None:
        for _ in steps:
            parts[1].zero_grad()
            F.cross_entropy(parts[0](x), y).backward()
            parts[1].step()

    (net, *_), (other, *_) = resumed(start, train, 3, 6)
    assert same(net.parameters(), other.parameters())
    _, (fresh, _) = resumed(lambda: start(without=True), train, 3, 6)
    assert not same(net.parameters(), fresh.parameters()), "the handle's state matters"


def test_a_state_of_other_layers_is_refused_and_changes_nothing() -> None:
    handle = binarise(mlp(), stochastic=True)
    handle.layers["2"].rounding.turns = 5
    good = handle.state_dict()
    for bad in (
        {},
        {"2": good["2"]},
        good | {"9": good["2"]},
        good | {"4": {"turns": "1"}},
        good | {"4": 3},
        7,
    ):
        with pytest.raises(StateError):
            handle.load_state_dict(bad)
        assert handle.state_dict() == good


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.out = nn.Embedding(7, 8), nn.Linear(8, 8), nn.Linear(8, 7)
        self.head = nn.Linear(8, 7)
        self.out.weight = self.embedding.weight


def hooked() -> nn.Module:
    net = mlp()
    net[4].register_forward_hook(lambda *given: None)
    return net


def done() -> nn.Module:
    net = mlp()
    binarise(net)
    return net


def between(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 2, 3), layer, nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3))


CANNOT = [
    (nn.Sequential(nn.ReLU()), {}, AttachError, "no Linear, Conv2d"),
    (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), {}, AttachError, "leave none"),
    (nn.Linear(3, 3), {}, AttachError, "wrap it in nn.Sequential"),
    (done(), {}, AttachError, "'2' has few bits already"),
    (Tied(), {}, AttachError, "'embedding' and 'out' share their weight"),
    (hooked(), {}, AttachError, "'4' has hooks"),
    (mlp().bfloat16(), {}, AttachError, r"2\.weight is torch\.bfloat16, but .* call model\.float\(\)"),
    (mlp().double(), {}, AttachError, r"2\.weight is torch\.float64, but master weights must be float32"),
    (mlp(), {"keep": ("77",)}, AttachError, "no module '77'"),
    (mlp(), {"keep": ("",)}, AttachError, "no Linear, Conv2d"),
    (mlp(), {"first": "int8"}, SpecError, "first must be 'real', 'weights' or 'binary'"),
    (mlp(), {"last": "weights"}, SpecError, "last must be 'real' or 'binary'"),
    (mlp(), {"stochastic": 1}, SpecError, "stochastic must be True or False"),
    (mlp(), {"norm": "power"}, SpecError, "norm must be"),
    (between(nn.Conv2d(2, 2, 3, padding="same")), {}, AttachError, "'1': padding of a few-bit convolution"),
    (between(nn.BatchNorm2d(2, affine=False)), {"norm": "shift"}, AttachError, "gamma, beta and running val"),
]


@for_each("net, how, error, says", CANNOT)
def test_what_cannot_be_treated_is_refused_and_stays_as_it_is(net, how, error, says) -> None:
    modules, parameters = [*net.modules()], [part.clone() for part in net.parameters()]
    refuses(error, says, binarise, net, **how)
    assert all(a is b for a, b in zip(net.modules(), modules, strict=True))
    assert same(net.parameters(), parameters)


@for_each(
    "how, says",
    [
        ({"weights": 0}, "weights must be a whole number in 1..8"),
        ({"activations": 9}, "activations must be"),
        ({"gradients": 2}, "gradients must be a whole number in 3..8"),
        ({"scale": "cubic"}, "scale must be"),
        ({"scale": "log", "stochastic": True}, "needs linear levels"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_bits_out_of_range_are_refused(how, says) -> None:
    refuses(SpecError, says, lambda: quantise(mlp(), **how))


def test_two_bits_of_activations_compute_with_four_levels() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.Conv2d(4, 2, 3))
    quantise(net, weights=1, activations=2, gradients=None)
    assert isinstance(net[1], FewBitConv2d)
    x = torch.randn(2, 4, 5, 5)
    level = ((x.clamp(-1, 1) + 1) * 1.5).round() / 1.5 - 1
    with torch.no_grad():
        expected = F.conv2d(
            level, torch.where(net[1].weight >= 0, 1.0, -1.0), net[1].bias, padding=1, groups=2
        )
        assert torch.allclose(net[1](x), expected, atol=1e-5)


def test_six_bit_gradients_reach_the_weights_on_average() -> None:
    """Mean over 1,000 draws beside the float gradient: within five sigma of the mean, entry by entry."""
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(3, 2))
    handle = quantise(net, gradients=6)
    layer, x, dy = net[1], torch.randn(8, 6), torch.randn(8, 3)
    found = []
    for _ in range(1000):
        layer.weight.grad = None
        layer(x).backward(dy)
        found.append(layer.weight.grad.clone())
    assert handle.layers["1"].rounding.turns == 1000
    plain = copy.deepcopy(net)
    plain[1].rounding.bits = quantise(mlp(), gradients=None).layers["2"].rounding.bits
    plain[1].weight.grad = None
    plain[1](x).backward(dy)
    stacked = torch.stack(found)
    assert bool((stacked.std(0) > 0).any())
    sigma = stacked.std(0) / math.sqrt(1000)
    assert bool(((stacked.mean(0) - plain[1].weight.grad).abs() <= 5 * sigma + 1e-6).all())


def test_shifts_replace_batch_norms() -> None:
    net = mlp()
    norm = net[1]
    handle = binarise(net, norm="shift")
    assert isinstance(net[1], ShiftBatchNorm) and net[1].weight is norm.weight
    assert [*handle.layers] == ["2", "4"]
    x = torch.randn(64, 8) * 3 + 1
    y = net[1](x)
    c = x - x.mean(0)

    def ap2(z: Tensor) -> Tensor:
        return z.sign() * 2.0 ** torch.log2(z.abs()).round()

    var = (c * ap2(c)).mean(0)
    assert torch.allclose(y, c * ap2((var + 1e-5).rsqrt()), atol=1e-5)
    assert torch.allclose(net[1].running_var, 0.875 + 0.125 * var, atol=1e-5)
    net.eval()
    assert torch.allclose(net[1](x), (x - net[1].running_mean) * ap2((net[1].running_var + 1e-5).rsqrt()))
    handle.remove()
    assert net[1] is norm and torch.equal(norm.running_mean, 0.125 * x.mean(0)), "its own values"


def test_a_norm_comes_back_with_the_buffers_of_a_model_that_was_moved() -> None:
    net = mlp()
    handle = binarise(net, norm="shift")
    net.double()
    net(torch.randn(64, 5, dtype=torch.float64))
    running = net[1].running_mean.clone()
    handle.remove()
    assert torch.equal(net[1].running_mean, running) and bool(running.any())


def test_binarised_training_learns_what_no_line_separates() -> None:
    torch.manual_seed(0)
    first, last = [nn.Linear(2, 64), nn.BatchNorm1d(64)], [nn.BatchNorm1d(64), nn.Linear(64, 2)]
    net = nn.Sequential(*first, nn.Linear(64, 64), *last)
    binarise(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    x = torch.randn(512, 2)
    y = (x[:, 0] * x[:, 1] > 0).long()
    for _ in range(150):
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    assert (net(x).argmax(1) == y).float().mean() > 0.8, "a line has half"


@for_each("reentrant", [False, True])
def test_checkpointing_repeats_the_signs_that_were_drawn(reentrant: bool) -> None:
    """A cell is called three times in each of two regions; the gradients are those without checkpointing."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(4, 6)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            for _ in range(3):
                h = self.cell(x, h)
            return h

    torch.manual_seed(3)
    net = nn.Sequential(Steps())
    binarise(net, first="binary", last="binary", stochastic=True)
    plain = copy.deepcopy(net)
    for _ in range(2):
        x, h = torch.randn(5, 4), torch.randn(5, 6, requires_grad=True)
        run = functools.partial(checkpoint, net[0], use_reentrant=reentrant)
        run(x, run(x, h)).square().sum().backward()
        plain[0](x, plain[0](x, h)).square().sum().backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad) and ours.grad.any()
    assert net[0].cell.rounding.turns == 12


def test_checkpointing_tells_two_calls_with_the_same_input_apart() -> None:
    net = mlp()
    binarise(net, first="binary", stochastic=True, norm="shift")
    plain, x = copy.deepcopy(net), torch.randn(6, 5)
    for call in (functools.partial(checkpoint, net, use_reentrant=False), plain):
        (call(x).square().sum() + call(x).exp().sum()).backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert same(net.buffers(), plain.buffers())
