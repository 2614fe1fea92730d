"""Activations kept as coded bytes: what must stay exact, how large the error is, and that memory is freed."""

from __future__ import annotations

import copy
import gc
import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.unit.shared import for_each, refuses
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import laconic
from laconic.activations.pool_indices import PoolIndices, Windows
from laconic.core.errors import AttachError, NonFiniteError, SpecError
from laconic.tools.tasks.cifar10 import resnet20
from laconic.transforms.transform import TransformHandle


def vgg() -> nn.Sequential:
    first = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
    second = nn.Conv2d(8, 8, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    third = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()
    return nn.Sequential(*first, *second, *third, nn.Linear(16 * 64, 32), nn.Tanh(), nn.Linear(32, 10))


def batch(n: int = 8) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, 32, 32, generator=rng), torch.randint(0, 10, (n,), generator=rng)


def keeping(model: nn.Module, spec: str | laconic.activations.Coding | None) -> AbstractContextManager[Any]:
    """A block that codes activations, or one that keeps them as they are."""
    return nullcontext() if spec is None else laconic.activations.compress(model, spec)


def grads(
    model: nn.Module, x: Tensor, y: Tensor, spec: str | laconic.activations.Coding | None
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of the input and of all parameters of a copy of the model."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    torch.manual_seed(2)
    with keeping(model, spec):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    assert x.grad is not None
    return x.grad, [p.grad for p in model.parameters() if p.grad is not None]


@dataclass(frozen=True, repr=False)
class Halves(laconic.activations.Coding):
    """A coding of another package: float16, which has exact zeros and signs."""

    keeps_signs = True
    norms = "exact"

    def encode(self, x: Tensor, bound: float, signs: bool, key: int) -> Tensor:
        return x.half().view(torch.uint8)

    def decode(self, wire: Tensor, n: int) -> Tensor:
        return wire.view(torch.float16).float()


def test_a_custom_coding_needs_only_to_encode_and_decode() -> None:
    model = vgg()
    dense, coded = (grads(model, *batch(), spec) for spec in (None, Halves()))
    assert torch.equal(dense[0], coded[0]), "the ReLU's mask comes from the coded output"
    for one, other in zip(dense[1], coded[1], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=5e-5)  # of float16 inputs
    assert isinstance(Halves().attach(vgg()), TransformHandle)


@for_each("make", [vgg, resnet20])
@for_each(
    "spec", ["comet(norms='exact')", "comet(share=1.0, norms='exact')", "blocks(bits=2, norms='exact')"]
)
def test_only_the_weights_of_products_see_an_error(make: Callable[[], nn.Module], spec: str) -> None:
    """The input's gradient is that of dense, bit by bit, through ReLU, pool, dropout, tanh and batch norm."""
    torch.manual_seed(0)
    model, (x, y) = make(), batch()
    exact, lossy = grads(model, x, y, None), grads(model, x, y, spec)
    assert torch.equal(exact[0], lossy[0])
    changed = 0
    for one, other in zip(exact[1], lossy[1], strict=True):
        if one.dim() == 1:
            assert torch.equal(one, other)
        else:
            changed += not torch.equal(one, other)
    assert changed >= 4


def test_the_error_stays_below_its_share() -> None:
    torch.manual_seed(0)
    model, (x, y) = resnet20(), batch(16)
    dense = copy.deepcopy(model)
    F.cross_entropy(dense(x), y).backward()
    with laconic.activations.compress(model, "comet(share=0.02, norms='exact')") as session:
        for _ in range(2):  # the bounds of the second pass come from the first
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
    for one, other in zip(dense.parameters(), model.parameters(), strict=True):
        if one.dim() > 1:
            assert one.grad is not None and other.grad is not None
            assert float((other.grad - one.grad).std()) <= 1.1 * 0.02 * float(one.grad.abs().mean())
    assert all(bound is not None and bound > 0 for bound in session.bounds().values())


def test_the_law_of_the_error_holds_on_real_layers() -> None:
    """std of a weight gradient's error = rms(g) sqrt(n R) eb / sqrt(3) within 5 % on ResNet-20."""
    torch.manual_seed(0)
    model, (x, y) = resnet20(), batch(16)
    seen: dict[str, list[Tensor]] = {}

    def see(name: str, module: nn.Module, given: tuple[Tensor], out: Tensor) -> None:
        seen[name] = [given[0].detach()]
        out.register_hook(seen[name].append)

    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(partial(see, name))
    F.cross_entropy(model(x), y).backward()
    told = {}
    for name, (given, g) in seen.items():
        conv = model.get_submodule(name)
        assert isinstance(conv, nn.Conv2d)
        layer = layer_of(conv, given, g)
        eb = 0.02 * float(given.square().mean().sqrt())
        flat = given.reshape(-1).contiguous()
        wire = laconic.kernels.error_bound_encode(flat, eb)
        error = laconic.kernels.error_bound_decode(wire, flat.numel()).view_as(given) - given
        wrong = torch.nn.grad.conv2d_weight(error, conv.weight.shape, g, conv.stride, conv.padding)
        told[name] = float(wrong.square().mean().sqrt()) / (layer * eb)
    assert len(told) == 19
    assert all(abs(ratio - 1) < 0.05 for ratio in told.values()), told


def layer_of(conv: nn.Conv2d, x: Tensor, g: Tensor) -> float:
    """sigma for a bound of 1, as the session computes it."""
    from laconic.activations.comet import Comet
    from laconic.activations.layer import Layer, terms

    layer = Layer("", conv.weight, Comet(), lambda weight: None)
    layer.begin(x)
    geometry = tuple(zip(conv.stride, conv.padding, conv.dilation, strict=True))
    layer.record_products(g, terms(x.shape, g.shape, conv.weight.shape, geometry), x.shape[0], layer.support)
    return layer.spread


def test_bytes_are_freed_and_counted() -> None:
    """What lives after the forward pass is what the ledger says."""
    torch.manual_seed(0)
    model, (x, y) = resnet20(), batch(16)
    kept = laconic.activations.measure(model, x, "comet(share=0.05)")

    def alive() -> int:
        gc.collect()
        found = {}
        for each in gc.get_objects():
            if type(each) in (Tensor, nn.Parameter):
                storage = each.untyped_storage()
                found[storage._cdata] = storage.nbytes()
        return sum(found.values())

    before = alive()
    with laconic.activations.compress(model, "comet(share=0.05)"):
        loss = F.cross_entropy(model(x), y)
    lives = alive() - before
    assert kept.kept * 0.8 < lives < kept.kept * 1.1
    assert kept.ratio > 6
    loss.backward()


def test_a_session_serves_one_thread_at_a_time() -> None:
    """A second thread is refused while the first is inside, and may open the session afterwards."""
    model, (x, _) = vgg(), batch(2)
    session = laconic.activations.compress(model, "comet()")
    errors: list[str] = []

    def use() -> None:
        try:
            with session:
                model(x)
        except AttachError as error:
            errors.append(str(error))

    def in_a_thread() -> list[str]:
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        return errors

    with session:
        model(x).sum()
        assert "open in another thread" in in_a_thread()[0]
    assert len(in_a_thread()) == 1


def test_measure_leaves_the_model_as_it_is() -> None:
    torch.manual_seed(0)
    model, (x, _) = vgg(), batch()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    kept = laconic.activations.measure(model, x)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert kept.dense == sum(row.dense for row in kept.rows) and kept.ratio > 3
    assert "smaller" in kept.table() and kept.picture().count("<rect") == 2 * len(kept.rows)


def test_checkpointed_regions_keep_nothing_and_the_rest_is_coded() -> None:
    torch.manual_seed(0)
    model, (x, y) = vgg(), batch()
    exact, _ = grads(model, x, y, None)
    given = x.clone().requires_grad_()
    torch.manual_seed(2)
    with laconic.activations.compress(model, "comet(norms='exact')"):
        loss = F.cross_entropy(model[5:](checkpoint(model[:5], given, use_reentrant=False)), y)
        loss.backward()
    assert given.grad is not None
    model[1].eval()
    assert float((given.grad - exact).abs().max()) <= 1e-5 * float(exact.abs().max())


def test_autocast_keeps_sixteen_bits_within_the_bound() -> None:
    torch.manual_seed(0)
    model, (x, y) = vgg(), batch()

    def run(spec: str | None) -> list[Tensor]:
        twin = copy.deepcopy(model)
        torch.manual_seed(2)
        with torch.autocast("cpu", dtype=torch.bfloat16), keeping(twin, spec):
            loss = F.cross_entropy(twin(x), y)
        loss.backward()
        return [p.grad for p in twin.parameters() if p.grad is not None]

    for one, other in zip(run(None), run("comet(norms='exact')"), strict=True):
        if one.dim() == 1:
            assert torch.equal(one, other)
        else:
            assert float((one - other).norm()) < 0.03 * float(one.norm())


@for_each("spec", ["comet(share=0.1)", "blocks(bits=2)"])
@for_each("bias", [False, True])
def test_autocast_s_weight_is_not_taken_for_an_input_of_as_many_elements(spec: str, bias: bool) -> None:
    torch.manual_seed(0)
    wide = 32
    model = nn.Sequential(nn.Linear(wide, wide, bias), nn.SiLU(), nn.Linear(wide, wide, bias))

    def run(spec: str | None) -> Tensor:
        twin = copy.deepcopy(model)
        x = torch.randn(2, wide, wide // 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
        keeps = keeping(twin, spec)
        for _ in range(3):  # adaptive bounds begin at the second
            x.grad = None
            with keeps, torch.autocast("cpu", dtype=torch.bfloat16):
                loss = twin(x.transpose(1, 2)).float().square().mean()
            loss.backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(run(None), run(spec))


@for_each("layer, shape", [(nn.Conv2d(3, 4, 3), (3, 8, 8)), (nn.Conv1d(3, 4, 3), (3, 8))])
def test_a_convolution_without_a_batch_is_coded_as_with_one_of_one(layer, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def run(x: Tensor) -> Tensor:
        twin = copy.deepcopy(layer)
        with laconic.activations.compress(twin, "comet()"):
            for _ in range(2):
                twin.zero_grad()
                twin(x).square().sum().backward()
        return twin.weight.grad

    assert torch.allclose(run(x), run(x[None]))


def test_channels_last_comes_back_as_it_was() -> None:
    torch.manual_seed(0)
    model, (x, y) = vgg().to(memory_format=torch.channels_last), batch()
    x = x.to(memory_format=torch.channels_last)
    assert torch.equal(grads(model, x, y, None)[0], grads(model, x, y, "comet(norms='exact')")[0])


@for_each("options", [(2, None, 0, 1), ((2,), (), 0, 1), (3, 2, 1, 1), (3, 1, 1, 2), ((2, 3), (1, 2), 0, 1)])
def test_places_in_windows_are_exact(options: tuple[object, ...]) -> None:
    x = torch.randn(2, 3, 17, 19, generator=torch.Generator().manual_seed(0))
    indices = F.max_pool2d(x, *options[:2], *options[2:], return_indices=True)[1]  # type: ignore[call-overload]
    kept = PoolIndices.of(indices, Windows.of(x, *options))
    assert torch.equal(kept.unpack(), indices)
    assert kept.nbytes <= indices.numel() // 2


def test_momentum_sets_the_bound_where_the_optimiser_is_known() -> None:
    torch.manual_seed(0)
    model, (x, y) = vgg(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    told = []
    for given in (None, optimizer):
        with laconic.activations.compress(model, "comet(every=1)", given) as session:
            for _ in range(6):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            told.append(session.bounds())
    assert all(told[1][name] > 1.5 * told[0][name] for name in ("3", "6")), told  # type: ignore[operator]


def test_an_output_that_is_changed_in_place_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with laconic.activations.compress(model):
        out = model(torch.ones(3, 4))
        out.add_(1)
        refuses(RuntimeError, "changed in place", lambda: out.sum().backward())


@for_each("bad", [math.nan, math.inf])
def test_activations_that_are_not_finite_are_refused_by_layer(bad: float) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight[0, 0] = bad
    with laconic.activations.compress(model), pytest.raises(NonFiniteError, match="the input of 1: "):
        model(torch.ones(3, 4))


def test_refuse_wrong_specs_and_models() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(SpecError, match=r"activations take comet\(...\) or blocks\(...\), got topk"):
        laconic.activations.compress(model, "topk(density=0.1)")
    refuses(SpecError, "share must be", laconic.activations.compress, model, "comet(share=0)")
    with pytest.raises(AttachError, match="compiled"):
        laconic.activations.compress(torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    refuses(AttachError, "no trainable weight", lambda: laconic.activations.compress(nn.ReLU()))
    with (
        laconic.activations.compress(model),
        pytest.raises(AttachError, match="compressed already"),
        laconic.activations.compress(model),
    ):
        pass


def test_specs_are_their_repr() -> None:
    for spec in ("comet()", "comet(share=0.05, mode='paper')", "blocks(bits=2)"):
        assert repr(laconic.parse(spec)) == spec


class Unrolled(nn.Module):
    """A layer that is called `times` in a forward pass."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.inner, self.times = nn.Linear(32, 32), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x + self.inner(x).tanh()
        return x


@for_each(
    "times, parts, stepping", [(1, 1, True), (16, 1, False), (16, 1, True), (1, 16, True), (4, 4, False)]
)
def test_the_bound_holds_for_all_calls_whose_gradients_add_up(times: int, parts: int, stepping: bool) -> None:
    """Sigma of the weight's gradient over mean |momentum|, or |gradient|, of the same batch in each step."""
    torch.manual_seed(0)
    model, share = Unrolled(times), 0.01
    weight = model.inner.weight
    x, y = torch.randn(64 * parts, 32), torch.randn(64 * parts, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5) if stepping else None

    def gradient() -> Tensor:
        model.zero_grad()
        for one, other in zip(x.chunk(parts), y.chunk(parts), strict=True):
            ((model(one) - other).square().mean() / parts).backward()
        assert weight.grad is not None
        return weight.grad.clone()

    exact, found = gradient(), []
    with laconic.activations.compress(model, f"comet(share={share})", optimizer) as session:
        for step in range(13):
            error = gradient() - exact
            if optimizer is not None:
                optimizer.step()
            if step > 10:  # the bound of step 10's statistics: momentum is there by then
                held = exact if optimizer is None else optimizer.state[weight]["momentum_buffer"]
                found.append(float(error.square().mean().sqrt() / held.abs().mean()))
    assert session.state_dict()["layers"]["inner.weight"]["calls"] == 13
    assert all(0.7 * share < each < 1.2 * share for each in found), found


@for_each("late", [False, True])
def test_a_skipped_step_s_gradient_is_forgotten(late: bool) -> None:
    """The weight stays as it is, and its gradient is cleared before the next forward pass or after it."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(16, 4)
    with laconic.activations.compress(model, "comet(every=1)") as session:
        for _ in range(3):
            if not late:
                model.zero_grad()
            loss = model(x).square().mean()
            model.zero_grad()
            loss.backward()
    once = laconic.activations.compress(model, "comet(every=1)")
    model.zero_grad()
    with once:
        model(x).square().mean().backward()
    spread = [each.state_dict()["layers"]["weight"]["spread"] for each in (session, once)]
    assert spread[0] == spread[1] > 0


def test_equal_values_err_alike_and_zeros_do_not_err() -> None:
    """Constant features exceed the law, which takes errors for independent, by at most sqrt(3 n)."""
    torch.manual_seed(0)
    n, share, model = 1024, 0.01, nn.Linear(32, 32)
    ones = torch.randn(1, 8).expand(n, 8)
    x, y = torch.cat([torch.randn(n, 16), ones, torch.zeros(n, 8)], 1), torch.randn(n, 32) + 1

    def gradient() -> Tensor:
        model.zero_grad()
        (model(x) - y).square().mean().backward()
        assert model.weight.grad is not None
        return model.weight.grad.clone()

    exact = gradient()
    with laconic.activations.compress(model, f"comet(share={share})"):
        gradient()
        error = (gradient() - exact) / exact.abs().mean()
    drawn, constant, zero = (each.square().mean().sqrt() for each in error.split([16, 8, 8], 1))
    assert drawn < 2 * share and zero == 0
    assert 3 * share < constant < share * (3 * n) ** 0.5
