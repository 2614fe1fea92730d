"""Converted layers inside torch's transformer encoders are called, also in evaluation without gradients."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from tests.unit.shared import for_each
from torch import Tensor, nn

from laconic.core.errors import AttachError
from laconic.lowbit import (
    admm,
    binarise,
    convert,
    load_packed,
    load_tables,
    pack,
    quantise,
    save_packed,
    straight_through,
)
from laconic.sparsity import export, rigl, swat

CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # torch's slow path adds in another order than its kernel


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


class One(nn.Module):
    """A single encoder layer between two dense ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.encoder, self.last = nn.Linear(16, 16), layer(), nn.Linear(16, 4)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        return self.last(self.encoder(self.first(x), src_key_padding_mask=padded))


class Two(One):
    """An encoder of two layers, which makes nested tensors of what is not padded."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(layer(), 2)


pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # of plain models
X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))
PADDED = torch.arange(5)[None] >= torch.tensor([5, 3, 4])[:, None]
NORMS = ("encoder.norm1", "encoder.norm2")
CONVERTED = {"swat": lambda model: swat(model, 0.9), "binarise": binarise, "quantise": quantise}


def seen(model: nn.Module, x: Tensor = X) -> Tensor:
    """What is not padded of the results without gradients, which are those with gradients."""
    slow = model(x, PADDED)
    assert slow.requires_grad or not any(each.requires_grad for each in model.parameters())
    with torch.no_grad():
        fast = model(x, PADDED)
    torch.testing.assert_close(fast[~PADDED], slow[~PADDED].detach(), **CLOSE)
    return fast[~PADDED]


@for_each("build", [One, Two])
@for_each("name", CONVERTED)
def test_evaluation_without_gradients_computes_with_the_converted_layers(name, build) -> None:
    model = build().eval()
    with torch.no_grad():
        plain = model(X, PADDED)
    handle = CONVERTED[name](model)
    assert not torch.allclose(seen(model), plain[~PADDED], atol=0.05), "it computes otherwise"
    other = copy.deepcopy(model)
    assert torch.equal(seen(other), seen(model)), "a copy too"
    handle.remove()
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(
        module.use_nested_tensor for module in model.modules() if isinstance(module, nn.TransformerEncoder)
    )
    assert torch.equal(seen(other), seen(other)), "a copy stays as it is"


def test_low_bit_layers_are_called() -> None:
    model = convert(One(), bits=2, keep=("encoder.self_attn", *NORMS)).eval()
    seen(model)


@for_each("build", [One, Two])
def test_packed_layers_are_called(build, tmp_path: Path) -> None:
    model = build()
    binarise(model)
    model.eval()
    packed = pack(model)
    expected = seen(model)
    torch.testing.assert_close(seen(packed), expected, **CLOSE)  # torch's masked attention varies
    save_packed(packed, tmp_path / "packed.pt")
    again = load_packed(tmp_path / "packed.pt", build())
    torch.testing.assert_close(seen(again), expected, **CLOSE)


@for_each("build", [One, Two])
def test_packed_tables_are_called(build) -> None:
    model = build()
    handle = admm(model, torch.optim.SGD(model.parameters(), lr=0.1))
    packed = handle.pack().eval()
    expected = seen(handle.finish().eval())
    torch.testing.assert_close(seen(packed), expected, **CLOSE)
    file = io.BytesIO()
    torch.save(packed.state_dict(), file)
    file.seek(0)
    again = load_tables(build().eval(), torch.load(file, weights_only=True))
    torch.testing.assert_close(seen(again), expected, **CLOSE)


@for_each("build", [One, Two])
def test_exported_layers_are_called(build) -> None:
    model = build()
    sparse = rigl(model, torch.optim.SGD(model.parameters(), lr=0.1), 0.1, steps=10, layout="uniform")
    small = export(model.eval())
    torch.testing.assert_close(seen(small), seen(model), **CLOSE)
    sparse.remove()


class Attention(nn.Module):
    """An attention whose projection is an ordinary layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(16, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.attention.out_proj = nn.Linear(16, 16)
        self.middle, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.middle(self.attention(x, x, x)[0]))


REFUSED = {
    "swat": swat,
    "binarise": binarise,
    "quantise": quantise,
    "admm": lambda model, **more: admm(model, torch.optim.SGD(model.parameters(), lr=0.1), **more),
    "straight_through": lambda model, **more: straight_through(
        model, torch.optim.SGD(model.parameters(), lr=0.1), **more
    ),
}


@for_each("name", REFUSED)
def test_a_projection_that_attention_reads_is_refused_and_can_be_kept(name) -> None:
    model = Attention()
    before = [type(module) for module in model.modules()]
    with pytest.raises(AttachError, match=r"'attention\.out_proj' is the out_proj of an nn\.Multihead"):
        REFUSED[name](model)
    assert [type(module) for module in model.modules()] == before
    REFUSED[name](model, keep=("attention.out_proj",))


def test_an_export_leaves_a_projection_that_attention_reads() -> None:
    model = Attention().eval()
    for module in (model.attention.out_proj, model.middle):
        module.weight.data.masked_fill_(torch.rand(16, 16) > 0.1, 0)
    small = export(model)
    assert type(small.attention.out_proj) is nn.Linear and type(small.middle).__name__ == "SparseLinear"
    with torch.no_grad():
        torch.testing.assert_close(small(X), model(X), **CLOSE)
