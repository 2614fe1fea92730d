"""Sessions in unusual cases, and how long what they hold lives."""

from __future__ import annotations

import gc
import math
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from tests.unit.shared import for_each, refuses
from torch import Tensor, nn

import laconic
from laconic.activations import compress, measure
from laconic.activations.ledger import StorageRef
from laconic.activations.saved import BitMask, MemoryOrder


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def given(rows: int = 64) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))


def test_weights_that_get_new_storages_in_a_block_stay_exact() -> None:
    plain, model, values = net(), net(), given()
    x = values.clone().requires_grad_()
    plain(x).square().mean().backward()
    with compress(model, "comet(share=0.1)"):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # as a swap with averaged weights does
        again = values.clone().requires_grad_()  # where a weight was, unless its storage is held
        model(again).square().mean().backward()
    assert x.grad is not None and again.grad is not None
    assert torch.equal(x.grad, again.grad)


@for_each("fused", [False, True])
@for_each("known", [False, True])
def test_bounds_adapt_under_every_optimiser(fused: bool, known: bool) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    session = compress(model, "comet()", optimizer if known else None)
    with session:
        for _ in range(12):
            loss = model(given()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert [session.state_dict()["layers"][name]["calls"] for name in ("0.weight", "2.weight")] == [12, 12]
    assert all(bound is not None for bound in session.bounds().values())


def test_a_call_with_an_empty_input_changes_no_bound() -> None:
    def bounds(empty: bool) -> dict[str, float | None]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        session = compress(model, "comet(every=1)", optimizer)
        for _ in range(5):
            optimizer.zero_grad()
            with session:
                loss = model(given()).square().mean()
                if empty:
                    loss = loss + model(given()[:0]).sum()
                loss.backward()
            optimizer.step()
        return session.bounds()

    assert bounds(True) == bounds(False)


def test_a_state_loaded_under_a_smaller_share_has_smaller_bounds() -> None:
    def trained(session_of: str, steps: int, state: object = None) -> tuple[dict[str, float | None], object]:
        model = net()
        session = compress(model, session_of)
        if state is not None:
            session.load_state_dict(state)  # type: ignore[arg-type]
        for _ in range(steps):
            model.zero_grad()
            with session:
                model(given()).square().mean().backward()
        return session.bounds(), session.state_dict()

    coarse, state = trained("comet(share=0.5)", 6)
    fine, _ = trained("comet(share=0.005)", 2, state)
    own, _ = trained("comet(share=0.005)", 2)
    for name, bound in fine.items():
        assert bound is not None and own[name] is not None and coarse[name] is not None
        assert bound == pytest.approx(own[name], rel=0.05) and bound < coarse[name]  # type: ignore[operator]


class Moving(nn.Module):
    """Replaces a buffer in each forward pass."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        self.last = x.detach()
        out: Tensor = self.inner(x)
        return out


def test_measuring_in_the_middle_of_an_accumulation_leaves_all_as_it_is() -> None:
    def bounds(measured: bool) -> dict[str, float | None]:
        model = Moving()
        session = compress(model, "comet(every=1)")
        for step in range(3):
            model.zero_grad()
            for part in given().chunk(4):
                with session:
                    model(part).square().mean().backward()
                if measured and step == 1:
                    before = model.mean, model.last
                    measure(model, part, session)
                    assert (model.mean, model.last) == before
        return session.bounds()

    assert bounds(True) == bounds(False)


def test_large_float16_inputs_do_not_decode_to_inf() -> None:
    x = torch.tensor([65504.0, -65504.0, 1.0], dtype=torch.float16)
    assert torch.equal(MemoryOrder.of(x).shaped(x.float() * torch.tensor([1.001, 1.001, 1.0])), x)


def test_the_mask_of_a_relu_whose_output_is_nan_is_as_torch_has_it() -> None:
    x = torch.tensor([math.nan, -1.0, 0.0, 2.0])
    mask = BitMask.of(torch.relu(x), x.new_ones(())).unpack()
    assert mask.tolist() == [1.0, 0.0, 0.0, 1.0]


@for_each("function", [nn.Tanh, nn.Sigmoid, nn.Softmax, nn.ReLU])
def test_a_forward_without_a_backward_leaves_nothing(function: type[nn.Module]) -> None:
    """Softmax, tanh and sigmoid save their own output: kept with its graph, it would hold itself for ever."""
    act = function(dim=-1) if function is nn.Softmax else function()
    model, outputs = nn.Sequential(nn.Linear(8, 16), act, nn.Linear(16, 4)), []
    act.register_forward_hook(lambda module, given, out: outputs.append(StorageRef(out.untyped_storage())))
    for _ in range(3):
        with laconic.activations.compress(model):
            out = model(torch.ones(4, 8))
        del out
    gc.collect()
    assert [watch.expired() for watch in outputs] == [True] * 3


@for_each("function", [torch.tanh, torch.exp, nn.functional.relu])
def test_a_change_in_place_of_what_backward_needs_is_refused(function: object) -> None:
    """As torch refuses it without hooks."""
    model = nn.Linear(4, 4)
    with laconic.activations.compress(model):
        out = function(model(torch.ones(3, 4)))  # type: ignore[operator]
        out.add_(1)
    refuses(RuntimeError, "changed in place", lambda: out.sum().backward())


def test_gradients_of_gradients_pass_through_what_stays_exact() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(3, 4, requires_grad=True)

    def twice() -> Tensor:
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    dense = twice()
    with laconic.activations.compress(model):
        assert torch.equal(twice(), dense)


def trained(how: str) -> list[float | None]:
    """The bound of the last layer after each of six steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session, bounds = laconic.activations.compress(model, "comet(every=1)", optimizer), []

    def step(forward: AbstractContextManager[object], around: AbstractContextManager[object]) -> None:
        with around:
            with forward:
                loss = model(torch.randn(64, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        bounds.append(session.bounds()["2"])

    with session if how == "one block" else nullcontext():
        for _ in range(6):
            step(
                session if how == "a block a forward" else nullcontext(),
                session if how == "a block a step" else nullcontext(),
            )
    return bounds


@for_each("how", ["a block a step", "a block a forward"])
def test_bounds_follow_the_gradients_however_a_session_is_opened(how: str) -> None:
    bounds = trained("one block")
    assert None not in bounds[1:] and len(set(bounds)) == 6
    assert trained(how) == bounds


def test_statistics_leave_no_hook_on_a_weight() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with laconic.activations.compress(model) as session:
        loss = model(torch.ones(3, 4)).sum()
    loss.backward()
    assert len(session.bounds()) == 2
    assert not any(weight._post_accumulate_grad_hooks for weight in model.parameters())
