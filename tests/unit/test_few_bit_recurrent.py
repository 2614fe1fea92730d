"""Few-bit LSTM and GRU layers equal torch's at real levels, their cells at each step, and packed forms."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.shared import for_each, refuses
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from laconic.core.errors import AttachError, SpecError
from laconic.lowbit import (
    FewBitGRU,
    FewBitLSTM,
    FewBitLSTMCell,
    PackedGRU,
    PackedLSTM,
    binarise,
    load_packed,
    pack,
    quantise,
    save_packed,
)

INPUTS, WIDTH, TIMES, BATCH = 6, 5, 4, 3
KINDS = (nn.LSTM, nn.GRU)
SHAPES = [
    {"num_layers": layers, "bidirectional": both, "bias": bias}
    for layers, both, bias in product((1, 2), (False, True), (False, True))
]
ALL = {"first": "binary", "last": "binary"}


def layer_of(kind: Any, **shape: Any) -> nn.Module:
    torch.manual_seed(3)
    layer = kind(INPUTS, WIDTH, **shape)
    for part in layer.parameters():
        nn.init.uniform_(part, -1.5, 1.5)
    return layer


def state_of(layer: Any, batch: int | None = BATCH) -> Any:
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    shape = (count, WIDTH) if batch is None else (count, batch, WIDTH)
    h, c = torch.rand(shape) - 0.5, torch.rand(shape)
    return (h, c) if isinstance(layer, nn.LSTM) else h


def flat(result: tuple[Any, Any]) -> list[Tensor]:
    out, state = result
    states = state if isinstance(state, tuple) else (state,)
    return [out.data if isinstance(out, PackedSequence) else out, *states]


def calls_of(layer: Any) -> list[tuple[Any, ...]]:
    """Arguments of every kind: with and without states, one sequence, and several of different lengths."""
    first = layer.batch_first
    x = torch.randn(BATCH, TIMES, INPUTS) if first else torch.randn(TIMES, BATCH, INPUTS)
    sorted_, unsorted = (
        pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=lengths[0] == 4)
        for lengths in (torch.tensor([4, 2, 1]), torch.tensor([1, 4, 3]))
    )
    alone = torch.randn(TIMES, INPUTS)
    return [
        (x,),
        (x, state_of(layer)),
        (alone,),
        (alone, state_of(layer, None)),
        (sorted_,),
        (sorted_, state_of(layer)),
        (unsorted,),
        (unsorted, state_of(layer)),
    ]


@for_each("kind", KINDS)
@for_each("shape", [*SHAPES, {"batch_first": True}, {"batch_first": True, "bidirectional": True}])
def test_a_layer_of_real_levels_is_torchs(kind, shape) -> None:
    plain = layer_of(kind, **shape)
    with torch.no_grad():
        for name, part in plain.named_parameters():
            if name.startswith("weight"):
                part.copy_(torch.where(part >= 0, 1.0, -1.0))
    net = nn.ModuleList([copy.deepcopy(plain)])
    quantise(net, 1, None, None, **ALL)
    assert type(net[0]) is (FewBitLSTM if kind is nn.LSTM else FewBitGRU)
    for args in calls_of(plain):
        ours, theirs = net[0](*args), plain(*args)
        for one, other in zip(flat(ours), flat(theirs), strict=True):
            assert torch.allclose(one, other, atol=1e-5)
        if isinstance(ours[0], PackedSequence):
            for one, other in zip(ours[0][1:], theirs[0][1:], strict=True):
                assert one is other is None or torch.equal(one, other)
        for module, result in ((net[0], ours), (plain, theirs)):
            module.zero_grad()
            sum(each.square().sum() for each in flat(result)).backward()
        for one, other in zip(net[0].parameters(), plain.parameters(), strict=True):
            assert torch.allclose(one.grad, other.grad, atol=1e-3, rtol=1e-3)


@for_each("kind, cell", [(nn.LSTM, nn.LSTMCell), (nn.GRU, nn.GRUCell)])
@for_each("bits", [(1, 1), (2, 3), (4, 4)])
def test_a_layer_is_its_cell_at_each_step(kind, cell, bits) -> None:
    net = nn.ModuleList([layer_of(kind), cell(INPUTS, WIDTH)])
    for name, part in net[1].named_parameters():
        part.data.copy_(net[0].get_parameter(f"{name}_l0"))
    quantise(net, *bits, None, **ALL)
    x = torch.randn(TIMES, BATCH, INPUTS)
    state, outputs = None, []
    for step in x:
        state = net[1](step, state)
        outputs.append(state[0] if isinstance(net[1], FewBitLSTMCell) else state)
    ours, _ = net[0](x)
    assert torch.equal(ours, torch.stack(outputs))
    ours.square().sum().backward()
    torch.stack(outputs).square().sum().backward()
    for one, other in zip(net[0].parameters(), net[1].parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-5, rtol=1e-4)


@for_each("kind", KINDS)
def test_gradients_have_few_bits_and_random_rounding_differs_between_steps(kind) -> None:
    net = nn.ModuleList([layer_of(kind)])
    quantise(net, gradients=4, **ALL)
    out, _ = net[0](torch.randn(1, 1, INPUTS))
    out.square().sum().backward()
    for bias in (net[0].bias_ih_l0, net[0].bias_hh_l0):
        exponents = torch.log2(bias.grad[bias.grad != 0].abs())
        assert len(exponents) and torch.equal(exponents, exponents.round())
    net = nn.ModuleList([layer_of(kind)])
    handle = quantise(net, 1, 1, None, stochastic=True, **ALL)
    x = torch.full((1, 1, INPUTS), 0.3).expand(200, 1, INPUTS)
    product = net[0]._product("ih", "l0")
    shares = torch.stack([product(each[0], t) for t, each in enumerate(x)]).unique(dim=0)
    assert len(shares) > 10
    state = handle.state_dict()
    first = net[0](x)[0]
    assert not torch.equal(net[0](x)[0], first)
    handle.load_state_dict(state)
    assert torch.equal(net[0](x)[0], first)


@for_each("kind, form", [(nn.LSTM, PackedLSTM), (nn.GRU, PackedGRU)])
@for_each("bits", [(1, 1), (2, 2), (4, None)])
@for_each("shape", [*SHAPES[-2:], {"batch_first": True}])
def test_packed_layers_have_the_bits_of_the_simulated_ones(kind, form, bits, shape, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.ModuleList([layer_of(kind, **shape)])

    net = build()
    quantise(net, *bits, **ALL)
    packed = pack(net.eval())
    save_packed(packed, tmp_path / "model")
    again = load_packed(tmp_path / "model", build())
    assert type(packed[0]) is type(again[0]) is form
    for args in calls_of(net[0]):
        with torch.no_grad():
            results = [flat(module[0](*args)) for module in (net, packed, again)]
        for result in results[1:]:
            assert all(torch.equal(one, other) for one, other in zip(result, results[0], strict=True))
    size = sum(each.nbytes for name, each in packed.state_dict().items() if ".bits" in name)
    weights = sum(len(each) * -(-each.shape[1] // 8) for each in net.parameters() if each.dim() > 1)
    assert size == bits[0] * weights


class Tagger(nn.Module):
    def __init__(self, kind: Any = nn.LSTM) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.inner = nn.Embedding(9, INPUTS), kind(INPUTS, WIDTH, 2, dropout=0.1)
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(self.words(x))[0])


@for_each("kind", KINDS)
def test_training_clips_resumes_and_ends_with_the_plain_layer(kind) -> None:
    def start() -> tuple[Any, ...]:
        model = Tagger(kind)
        handle = quantise(model, 2, 2, 6, first="binary", stochastic=True, seed=4)
        return model, torch.optim.Adam(model.parameters(), lr=0.5), handle

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            x, y = torch.randint(9, (7, 2)), torch.randint(4, (7, 2))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()

    plain = Tagger(kind)
    whole, again = start(), start()
    assert [*whole[0].state_dict()] == [*plain.state_dict()]
    masters = {f"inner.weight_{side}_l{i}" for side in ("ih", "hh") for i in (0, 1)}
    assert {*whole[2].weights} == masters
    run(*whole[:2], range(3))
    assert whole[2].flips() > 0
    assert all(whole[0].get_parameter(name).abs().max() == 1 for name in masters)
    for part, other in zip(again, whole, strict=True):
        part.load_state_dict(copy.deepcopy(other.state_dict()))
    run(*whole[:2], range(3, 6))
    run(*again[:2], range(3, 6))
    for one, other in zip(whole[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(one, other)
    parameters = [*whole[0].parameters()]
    copied = copy.deepcopy(whole[0])
    run(copied, torch.optim.Adam(copied.parameters(), lr=0.5), range(1))
    whole[2].remove()
    assert type(whole[0].inner) is kind and all(
        one is other for one, other in zip(parameters, whole[0].parameters(), strict=True)
    )
    run(*whole[:2], range(1))
    assert whole[0].inner.weight_hh_l0.abs().max() > 1, "clipping has ended"


def test_parameters_replaced_in_training_are_those_of_the_layer_that_remove_restores() -> None:
    model = Tagger()
    handle = binarise(model, first="binary")
    model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)
    handle.remove()
    with torch.no_grad():
        x, before = torch.zeros(3, 2, dtype=torch.long), model.eval()(torch.zeros(3, 2, dtype=torch.long))
        model.inner.weight_ih_l0.add_(1.0)
        assert not torch.equal(model(x), before)


def test_what_has_no_form_in_few_bits_is_refused() -> None:
    for make in (binarise, quantise):
        net = nn.Sequential(nn.LSTM(INPUTS, WIDTH, proj_size=2), nn.Linear(2, 2), nn.Linear(2, 2))
        refuses(AttachError, "'0': an LSTM with projections.*proj_size=2.*keep=", make, net, **ALL)
        assert type(net[0]) is nn.LSTM
        make(net, keep=("0",), **ALL)
    refuses(AttachError, "no Linear, Conv2d, LSTM, GRU", binarise, nn.Sequential(nn.RNN(3, 3)), **ALL)
    net = nn.ModuleList([nn.LSTM(INPUTS, WIDTH), nn.LSTM(INPUTS, WIDTH)])
    net[1].weight_hh_l0 = net[0].weight_hh_l0
    refuses(AttachError, "share their weight_hh_l0", binarise, net, **ALL)
    net = nn.ModuleList([layer_of(nn.LSTM)])
    quantise(net, 2, 2, scale="log", **ALL)
    refuses(AttachError, "'0': logarithmic levels cannot be packed", pack, net)
    refuses(SpecError, "weights", quantise, nn.ModuleList([layer_of(nn.GRU)]), 9)


@for_each("kind", KINDS)
def test_a_state_of_another_shape_is_refused(kind) -> None:
    net = nn.ModuleList([layer_of(kind)])
    binarise(net, **ALL)
    x = torch.randn(TIMES, BATCH, INPUTS)
    for wrong in (state_of(net[0], 1), state_of(net[0], None)):
        with pytest.raises(ValueError, match=r"the state must have the shape \(1, 3, 5\), got"):
            net[0](x, wrong)
