"""Masks on recurrent layers, attention and embeddings, and the density of the whole model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.unit.shared import for_each, refuses
from torch import nn

from laconic.core.errors import AttachError
from laconic.core.turn import Turn
from laconic.sparsity import rigl, sparsify
from laconic.sparsity.drop_and_grow import drop_and_grow
from laconic.sparsity.slots import slots

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")

LETTERS, WIDTH = 12, 8


class Language(nn.Module):
    """Letters (b, t) to logits (b, t, 12), by a recurrent layer or by attention."""

    def __init__(self, inner: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(LETTERS, WIDTH), inner, nn.Linear(width, LETTERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        inner = self.inner
        y = inner(x, x, x, need_weights=False) if isinstance(inner, nn.MultiheadAttention) else inner(x)
        return self.head(y[0] if isinstance(y, tuple) else y)


def lstm() -> Language:
    torch.manual_seed(0)
    return Language(nn.LSTM(WIDTH, 6, 2, batch_first=True, bidirectional=True, proj_size=4))


def gru() -> Language:
    torch.manual_seed(0)
    return Language(nn.GRU(WIDTH, WIDTH, batch_first=True))


def attention() -> Language:
    torch.manual_seed(0)
    return Language(nn.MultiheadAttention(WIDTH, 2, batch_first=True))


def encoder() -> Language:
    torch.manual_seed(0)
    return Language(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True))


MODELS = (lstm, gru, attention, encoder)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    letters = torch.randint(LETTERS, (3, 6), generator=torch.Generator().manual_seed(step))
    return letters[:, :-1], letters[:, 1:]


def loss_of(net: nn.Module, step: int) -> torch.Tensor:
    x, y = batch(step)
    return nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01)


def run(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()


@for_each("build", MODELS)
def test_every_matrix_of_a_language_model_is_masked_and_biases_are_not(build) -> None:
    net = build()
    sparse = rigl(net, adam(net), 0.2, steps=9)
    matrices = {name for name, part in net.named_parameters() if part.dim() > 1}
    assert sparse._shares.keys() | {name for name in matrices if net.get_parameter(name).all()} == matrices
    total = sum(part.numel() for part in net.parameters())
    used = sum(int(part.count_nonzero()) for name, part in net.named_parameters() if name in matrices)
    zeros = sum(net.get_parameter(name).numel() for name in matrices) - used
    stats = sparse.stats()
    assert stats.density == pytest.approx(0.2, abs=0.02)
    assert stats.model_density == pytest.approx(1 - zeros / total, abs=1e-9)
    assert stats.model_density > stats.density
    assert sparse.events()[0]["model_density"] == stats.model_density


def test_attention_with_three_projections_has_a_mask_on_each() -> None:
    layer = nn.MultiheadAttention(WIDTH, 2, kdim=16, vdim=12)
    sparse = rigl(layer, adam(layer), 0.1, steps=9)
    assert {f"{part}_proj_weight" for part in "qkv"} | {"out_proj.weight"} == sparse.masks.keys()


@for_each("build", MODELS)
@for_each("spec", ["rigl(density=0.2, every=3)", "gradual_pruning(density=0.2, every=3)"])
def test_masked_weights_and_their_slots_stay_zero_and_a_resumed_run_has_the_same_bits(build, spec) -> None:
    def start() -> tuple[Any, ...]:
        net = build()
        optimizer = adam(net)
        return net, optimizer, sparsify(net, optimizer, spec, steps=12)

    net, optimizer, sparse = start()
    run(net, optimizer, range(7))
    saved = copy.deepcopy([each.state_dict() for each in (net, optimizer, sparse)])
    run(net, optimizer, range(7, 12))
    assert sparse.stats().density == pytest.approx(0.2, abs=0.02)
    for name, mask in sparse.masks.items():
        weight = net.get_parameter(name)
        assert not weight[~mask].any() and weight[mask].any(), name
        assert all(not slot[~mask].any() for slot in slots(optimizer, weight)), name
    again = start()
    for part, state in zip(again, saved, strict=True):
        part.load_state_dict(state)
    run(again[0], again[1], range(7, 12))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again[0].parameters(), strict=True))


@for_each("build", MODELS)
def test_entries_of_the_largest_dense_gradient_grow(build) -> None:
    net = build()
    optimizer = adam(net)
    sparse = rigl(net, optimizer, 0.3, steps=100, drop=0.5, seed=3)
    plain = build()
    plain.load_state_dict(net.state_dict())
    loss_of(plain, 0).backward()
    before = copy.deepcopy(sparse.masks)
    run(net, optimizer, range(1))
    for name, mask in before.items():
        weight, count = plain.get_parameter(name).detach().flatten(), int(0.5 * int(mask.sum()))
        score = plain.get_parameter(name).grad.flatten().abs()
        key = Turn(0, seed=3).common(name)
        wanted = drop_and_grow(weight.abs(), mask.flatten(), score, count, key)
        assert torch.equal(sparse.masks[name].flatten(), wanted), name


def test_layouts_count_layers_and_rows() -> None:
    net = gru()
    uniform = rigl(net, adam(net), 0.25, steps=9, layout="uniform")
    assert uniform.densities == pytest.approx(
        {"inner.weight_ih_l0": 0.25, "inner.weight_hh_l0": 0.25, "head.weight": 0.25}, abs=0.01
    )
    uniform.remove()
    fours = rigl(net, adam(net), 0.5, steps=9, layout="2:4")
    assert fours.masks.keys() == uniform.masks.keys() | {"embed.weight"}
    run(net, fours._optimizer, range(9))
    for mask in fours.masks.values():
        assert (mask.view(-1, 4).sum(1) == 2).all()
    odd = nn.LSTM(6, 8)  # rows of 6 and of 8
    assert rigl(odd, adam(odd), 0.5, steps=9, layout="2:4").masks.keys() == {"weight_hh_l0"}


def test_an_embedding_with_sparse_gradients_is_refused_unless_it_is_kept() -> None:
    net = gru()
    net.embed = nn.Embedding(LETTERS, WIDTH, sparse=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    refuses(AttachError, "'embed' has sparse gradients.*sparse=False", rigl, net, optimizer, steps=9)
    assert rigl(net, optimizer, steps=9, keep=("embed",)).masks


def test_the_uniform_layout_leaves_all_of_a_first_attention_layer_dense() -> None:
    net = nn.Sequential(nn.MultiheadAttention(WIDTH, 2), nn.Linear(WIDTH, WIDTH))
    assert rigl(net, adam(net), 0.5, steps=9, layout="uniform").masks.keys() == {"1.weight"}
