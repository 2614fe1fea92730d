"""Few bits where something is unusual: NaN, replaced parameters, parametrizations, `meta`, empty batches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.unit.shared import for_each, refuses
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from laconic.core.errors import AttachError, StateError
from laconic.lowbit import admm, binarise, convert, load_packed, load_tables, pack, quantise
from laconic.lowbit.levels import level_indices
from laconic.optim import QCMDAdaGrad, QRDAAdaGrad
from laconic.sparsity import rigl, swat
from laconic.tools.tasks.transforms import PACKED, Transforms, attached


def layers(*, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    between = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(8, 8), *between, nn.Linear(8, 8), nn.Linear(8, 3))


def test_a_nan_stays_nan_in_one_bit_too() -> None:
    x = torch.tensor([math.nan, -1.0, 0.0])
    for bits in (1, 2):
        assert bool(level_indices(x, bits)[0].isnan()) and bool(level_indices(x, bits)[1:].isfinite().all())
    net = layers(norm=True)
    binarise(net)
    x = torch.randn(4, 8)
    x[0, 0] = math.nan
    assert bool(net(x).isnan().any())


def test_weights_that_are_not_finite_are_not_packed() -> None:
    net = layers()
    binarise(net)
    with torch.no_grad():
        net[1].weight[0, 0] = math.nan  # type: ignore[index]
    refuses(AttachError, r"1\.weight has NaN or Inf", pack, net)


def test_hooks_are_not_lost_by_pack() -> None:
    net = layers()
    binarise(net)
    hook = net[1].register_forward_hook(lambda module, args, out: out * 0)
    refuses(AttachError, "'1' has hooks", pack, net)
    hook.remove()
    pack(net)


def test_remove_leaves_the_parameters_that_are_there_now() -> None:
    net = layers(norm=True)
    handle = binarise(net, norm="shift")
    loaded = {
        name: torch.full_like(each, 0.5) if each.is_floating_point() else each
        for name, each in net.state_dict().items()
    }
    net.load_state_dict(loaded, assign=True)
    handle.remove()
    assert [type(each) for each in net] == [nn.Linear, nn.BatchNorm1d, nn.Linear, nn.Linear]
    assert all(bool((each == 0.5).all()) for each in net.parameters())


@for_each("treat", [lambda net: quantise(net, 1, 2, 6) and net, lambda net: convert(net, 4)])
def test_checkpointing_repeats_the_bits_of_gradients(treat: Callable[[nn.Module], nn.Module]) -> None:
    def gradients(call: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
        net = treat(layers())
        draws = torch.Generator().manual_seed(1)
        given = [torch.randn(5, 8, generator=draws, requires_grad=True) for _ in range(3)]
        torch.stack([call(net, x).square().sum() for x in given]).sum().backward()
        return [each.grad for each in (*given, *net.parameters()) if each.grad is not None]

    plain = gradients(lambda net, x: net(x))
    for reentrant in (True, False):
        again = gradients(functools.partial(checkpoint, use_reentrant=reentrant))
        assert all(torch.allclose(one, other) for one, other in zip(plain, again, strict=True)), reentrant


def test_a_model_on_meta_is_refused_unchanged() -> None:
    with torch.device("meta"):
        net = layers()
    refuses(AttachError, r"1\.weight is on meta", binarise, net)
    assert all(type(each) is nn.Linear for each in net)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by dynamo itself
def test_signs_alone_compile_once() -> None:
    net = layers()
    binarise(net)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    for _ in range(12):
        compiled(torch.randn(4, 8))


@for_each(
    "treat",
    [
        binarise,
        lambda net: admm(net, torch.optim.SGD(net.parameters(), lr=0.1)),
        lambda net: rigl(net, torch.optim.SGD(net.parameters(), lr=0.1), 0.5, steps=10),
        swat,
    ],
)
def test_parametrised_layers_are_refused_not_skipped(treat: Callable[[nn.Module], object]) -> None:
    net = nn.Sequential(nn.Linear(8, 8), parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 3))
    refuses(AttachError, r"'1' has parametrizations.*keep=\('1',\)", treat, net)


def test_converted_layers_take_empty_batches_and_single_images() -> None:
    net = convert(layers())
    net(torch.randn(0, 8)).sum().backward()
    convolution = convert(nn.Sequential(nn.Conv2d(3, 4, 3)))
    one = torch.randn(3, 6, 6, requires_grad=True)
    out = convolution(one)
    out.sum().backward()
    assert out.shape == (4, 4, 4) and one.grad is not None


def test_a_state_of_other_bits_is_refused() -> None:
    saved = binarise(layers(), stochastic=True, seed=1).state_dict()
    other = quantise(layers(), 3, 4, 6, seed=2)
    refuses(StateError, r"saved with FewBits.*use the same arguments", other.load_state_dict, saved)
    with pytest.raises(StateError, match="0 or more"):
        other.load_state_dict({name: each | {"turns": -5} for name, each in other.state_dict().items()})


def test_flips_after_loading_count_from_the_loaded_signs() -> None:
    trained, fresh = layers(), nn.Sequential(*[nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)])
    handle, again = binarise(trained), binarise(fresh)
    fresh.load_state_dict(trained.state_dict())
    again.load_state_dict(handle.state_dict())
    assert again.flips() == 0.0


def test_half_an_extra_gradient_step_is_taken_back() -> None:
    net = layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    handle = admm(net, optimizer, extragradient=True)
    before = net[1].bias.detach().clone()  # type: ignore[union-attr]
    net(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(net[1].bias, before)  # type: ignore[arg-type]
    handle.finish()
    assert torch.equal(net[1].bias, before)  # type: ignore[arg-type]


def test_after_remove_there_is_nothing_to_finish() -> None:
    net = layers()
    handle = admm(net, torch.optim.SGD(net.parameters(), lr=0.5))
    handle.remove()
    refuses(StateError, "without finish", handle.finish)


@for_each("make", [QCMDAdaGrad, QRDAAdaGrad])
@for_each("by", [{}, {"l1": 1e-3}, {"l2": 1e-3}])
def test_a_nan_gradient_shows_in_the_weights(make, by):
    weight = nn.Parameter(torch.ones(2, 4))
    optimizer = make([weight], lr=0.1, **by)
    weight.grad = torch.full((2, 4), 0.1)
    optimizer.step()
    weight.grad[0, 1] = math.nan
    optimizer.step()
    assert bool(weight[0, 1].isnan()) and bool(weight[1].isfinite().all())
    assert optimizer.zero_share() == 0.0


def backward(net: nn.Module, loss: Tensor) -> None:
    loss.backward()


def backward_and_probe(net: nn.Module, loss: Tensor) -> None:
    loss.backward()
    torch.autograd.grad(1000 * net(torch.ones(1, 8)).sum(), [*net.parameters()])


def by_hand(net: nn.Module, loss: Tensor) -> None:
    parameters = [*net.parameters()]
    for each, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        each.grad = grad


@for_each("differentiate", [backward_and_probe, by_hand])
def test_masks_grow_by_the_gradients_that_weights_are_given(differentiate):
    def grown(differentiate: Callable[[nn.Module, Tensor], None]) -> dict[str, Tensor]:
        net = layers()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        sparse = rigl(net, optimizer, 0.5, steps=100, every=2)
        draws = torch.Generator().manual_seed(1)
        for _ in range(5):
            optimizer.zero_grad()
            differentiate(net, net(torch.randn(4, 8, generator=draws)).square().mean())
            optimizer.step()
        return sparse.masks

    found = grown(differentiate)
    assert all(torch.equal(found[name], mask) for name, mask in grown(backward).items())


def test_a_state_of_before_bits_were_saved_is_taken() -> None:
    handle = quantise(layers(), 3, 4, 6, seed=2)
    handle.load_state_dict({name: {"turns": 7} for name in handle.layers})
    assert {each["turns"] for each in handle.state_dict().values()} == {7}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    norms = nn.BatchNorm1d(32), nn.BatchNorm1d(32)
    return nn.Sequential(nn.Linear(16, 32), norms[0], nn.Linear(32, 32), norms[1], nn.Linear(32, 4))


@for_each(
    "spec, load",
    [
        ("binarise(norm='shift')", lambda path: load_packed(path, build())),
        ("quantise()", lambda path: load_packed(path, build())),
        ("admm()", lambda path: load_tables(build().eval(), torch.load(path, weights_only=True))),
    ],
)
def test_a_training_leaves_a_packed_model_that_loads(spec, load, tmp_path: Path) -> None:
    model, x = build(), torch.randn(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    transforms = Transforms({"lowbit": attached("lowbit", spec, model, optimizer)})
    model(x).square().mean().backward()
    optimizer.step()
    (event,) = transforms.finish(tmp_path, rank=0)
    assert "times smaller" in event["message"]
    with torch.no_grad():
        assert torch.equal(load(tmp_path / PACKED)(x), model.eval()(x))
