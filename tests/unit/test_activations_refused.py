"""What cannot be coded is refused with the way out, and nothing stays dense without a word."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.unit.shared import for_each, refuses
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import laconic
from laconic.core.errors import AttachError

X = torch.ones(8, 4)
TRACED = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.fixture
def forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compiled(nn.Module):
    """Its second layer runs in a compiled function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.rest = torch.compile(lambda x: self.second(torch.relu(x)), backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.first(x))


@for_each("backend, before", [("eager", False), ("aot_eager", True)])
def test_a_compiled_twin_of_the_model_is_refused(forget: None, backend: str, before: bool) -> None:
    model = net()
    twin = torch.compile(model, backend=backend)
    if before:
        twin(X)
    refused = pytest.raises(
        AttachError, match=r"0 runs in a function that is compiled.*the model that is not"
    )
    with laconic.activations.compress(model), refused:
        twin(X)
    assert twin(X).shape == (8, 2)  # outside of the block it is as it was


def test_a_model_that_is_compiled_afterwards_is_refused(forget: None) -> None:
    model = net()
    session = laconic.activations.compress(model)
    model.compile(backend="aot_eager")
    with session, pytest.raises(AttachError, match="0 runs in a function that is compiled"):
        model(X)


@TRACED
def test_a_layer_in_a_compiled_function_is_refused(forget: None) -> None:
    model = Compiled()
    with (
        laconic.activations.compress(model),
        pytest.raises(AttachError, match="second runs in a function that is compiled"),
    ):
        model(X)


def test_a_block_inside_a_compiled_function_is_refused(forget: None) -> None:
    model = net()

    @torch.compile(backend="aot_eager")
    def loss(x: Tensor) -> Tensor:
        with laconic.activations.compress(model):
            return model(x).sum()

    refuses(AttachError, "the function that opens `compress` is compiled", loss, X)


@TRACED
def test_compiled_functions_without_layers_work_beside(forget: None) -> None:
    model = net()
    loss = torch.compile(lambda out: out.square().mean(), backend="aot_eager")
    with laconic.activations.compress(model):
        loss(model(X)).backward()
        with torch.no_grad():
            assert torch.compile(model, backend="aot_eager")(X).shape == (8, 2)
    assert all(p.grad is not None for p in model.parameters())


def dense_forward(model: nn.Module, run: Callable[[Tensor], Tensor]) -> Tensor:
    with laconic.activations.compress(model):
        return run(X.clone().requires_grad_())


UNSEEN: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "another model": lambda model, x: net()(x),
    "a checkpointed region": lambda model, x: checkpoint(model, x.tanh(), use_reentrant=False),
    "computed weights": lambda model, x: torch.tanh(x @ (2 * model[0].weight).t()),
}


@for_each("case", UNSEEN)
def test_a_block_that_codes_nothing_warns(case: str) -> None:
    model = net()
    with pytest.warns(UserWarning, match="no input of a layer is coded in this block"):
        dense_forward(model, lambda x: UNSEEN[case](model, x))


def test_the_warning_comes_with_the_first_backward_of_a_long_block() -> None:
    model, other = net(), net()
    with laconic.activations.compress(model):
        out = other(X).sum()
        with pytest.warns(UserWarning, match="no input of a layer is coded"):
            out.backward()
        other(X).sum().backward()  # once a block


def test_blocks_that_keep_nothing_or_code_something_do_not_warn() -> None:
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with laconic.activations.compress(model) as session, torch.no_grad():
            model(X)
        with session:
            (model(X) + net()(X)).sum().backward()


def test_weights_of_float64_are_refused() -> None:
    with pytest.raises(AttachError, match=r"the model's weights are torch.float64, .*: convert the model"):
        laconic.activations.measure(net().double(), X.double())


def test_measure_inside_a_block_is_refused() -> None:
    model = net()
    with (
        laconic.activations.compress(model) as session,
        pytest.raises(AttachError, match="measure opens its own block: call it outside"),
    ):
        laconic.activations.measure(model, X, session)


def test_attention_stays_dense_and_the_feed_forward_part_is_coded() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
    kept = laconic.activations.measure(layer, torch.randn(4, 3, 16))
    rows = {row.name: row for row in kept.rows}
    assert set(rows) == {"elsewhere", "linear1", "linear1 > relu", "linear2"}
    assert rows["elsewhere"].kept == rows["elsewhere"].dense
    assert rows["linear1"].kept < rows["linear1"].dense / 2
