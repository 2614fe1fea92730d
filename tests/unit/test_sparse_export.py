"""Exported models: the same outputs, fewer bytes, saved and loaded."""

from __future__ import annotations

import io

import pytest
import torch
from tests.unit.shared import for_each, refuses
from torch import nn
from torch.nn.utils import prune

from laconic.core.errors import AttachError, SpecError, StateError
from laconic.sparsity import SparseConv2d, SparseLinear, export, nbytes
from laconic.sparsity.sparse_weight import SparseWeight
from laconic.tools.tasks.cifar10 import resnet20


def thinned(model: nn.Module, density: float, seed: int = 0) -> nn.Module:
    rng = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.masked_fill_(torch.rand(weight.shape, generator=rng) >= density, 0)
    return model.eval()


CONVS = [
    {"in_channels": 3, "out_channels": 5, "kernel_size": 3},
    {"in_channels": 4, "out_channels": 8, "kernel_size": (1, 3), "stride": (2, 1), "padding": (0, 2)},
    {"in_channels": 4, "out_channels": 4, "kernel_size": 3, "dilation": 2, "padding": 2, "bias": False},
]


@for_each("form", ["csr", "auto"])
def test_a_convolution_is_the_same(form) -> None:
    for shape in CONVS:
        torch.manual_seed(0)
        layer = thinned(nn.Conv2d(**shape), 0.2)
        made, x = export(layer, form), torch.randn(2, shape["in_channels"], 9, 8)
        assert isinstance(made, SparseConv2d)
        torch.testing.assert_close(made(x), layer(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(made(x[0]), layer(x[0]), rtol=1e-5, atol=1e-5)


@for_each("ahead", [(), (6,), (2, 3)])
@for_each("form", ["csr", "2:4"])
def test_a_dense_layer_is_the_same(ahead, form) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 5)
    fours = layer.weight.data.view(-1, 4)
    fours.scatter_(1, torch.rand(fours.shape).topk(2).indices, 0)
    made, x = export(layer, form), torch.randn(*ahead, 16)
    assert isinstance(made, SparseLinear) and made.weight.form == form
    assert torch.equal(made.weight.dense(), layer.weight)
    torch.testing.assert_close(made(x), layer(x), rtol=1e-5, atol=1e-6)


def test_bytes_are_counted_and_two_of_four_keeps_fours_with_fewer() -> None:
    for entries in (0, 1, 2):
        weight = torch.zeros(4, 8)
        for row in weight.view(-1, 4):
            row[torch.randperm(4)[:entries]] = torch.randn(entries)
        made = SparseWeight(weight, "2:4")
        assert torch.equal(made.dense(), weight)
        assert nbytes(made) == 16 * 4 + 16 // 4
    layer = thinned(nn.Linear(100, 50), 0.1)
    entries = int((layer.weight != 0).sum())
    assert nbytes(export(layer)) == 8 * entries + 4 * 51 + 4 * 50


@for_each("ones", range(1, 64))
def test_auto_takes_the_form_that_is_smaller(ones) -> None:
    """Of 32 fours the first have two entries each, the rest one or none: CSR is smaller with few."""
    layer = nn.Linear(64, 2, bias=False)
    used = torch.zeros(32, 4)
    used[: ones // 2, :2] = 1
    used[ones // 2, : ones % 2] = 1
    layer.weight.data.mul_(used.view(2, 64))
    sizes = {form: nbytes(export(layer, form)) for form in ("csr", "2:4")}
    assert nbytes(export(layer)) == min(sizes.values())


def test_a_network_is_saved_and_loads_into_another_export() -> None:
    torch.manual_seed(0)
    one, other = thinned(resnet20(), 0.1, seed=1), thinned(resnet20(), 0.1, seed=2)
    x = torch.randn(2, 3, 32, 32)
    made = export(one)
    torch.testing.assert_close(made(x), one(x), rtol=1e-4, atol=1e-4)
    assert nbytes(made) < 0.25 * nbytes(one)
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    assert file.tell() < 0.5 * nbytes(one)
    file.seek(0)
    loaded = export(other)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(loaded(x), made(x))


def test_what_cannot_be_exported_is_refused() -> None:
    half = nn.Linear(16, 2)
    half.weight.data[:, 4:] = 0
    narrow = thinned(nn.Linear(16, 8), 0.2).to(torch.bfloat16)
    for error, words, model, *form in (
        (AttachError, "no layer of this model is sparse", nn.Linear(8, 8)),
        (AttachError, "more than two nonzeros", half, "2:4"),
        (SpecError, "form must be", nn.Linear(8, 8), "coo"),
        (AttachError, r"bfloat16.*model\.float", narrow, "csr"),
    ):
        refuses(error, words, export, model, *form)
    grouped = thinned(nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Linear(9, 9)), 0.1)
    assert isinstance(export(grouped)[0], nn.Conv2d)  # stays dense
    model = nn.Sequential(prune.l1_unstructured(nn.Linear(16, 8), "weight", 0.8))
    refuses(AttachError, r"'0\.weight' is computed from parameters.*remove .*pruning", export, model)
    prune.remove(model[0], "weight")
    assert isinstance(export(model)[0], SparseLinear)


def test_a_model_is_not_changed_by_its_export() -> None:
    net = thinned(nn.Sequential(nn.Linear(20, 20), nn.ReLU()), 0.1)
    before = net[0].weight.clone()
    export(net)[0].weight.values.zero_()
    assert torch.equal(net[0].weight, before) and isinstance(net[0], nn.Linear)
    layer = thinned(nn.Linear(16, 16), 0.2)
    made = export(nn.ModuleDict({"one": layer, "other": nn.Sequential(layer)}))
    assert made["one"] is made["other"][0] and isinstance(made["one"], SparseLinear)
    assert nbytes(made) == nbytes(export(layer)), "a layer of two names is stored once"


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_what_computes_otherwise_than_its_layer_stays_dense() -> None:
    net = thinned(nn.Sequential(nn.Linear(16, 16), Scaled(16, 16), nn.Linear(16, 16)), 0.2)
    net[2].register_forward_hook(lambda layer, args, y: y.relu())
    made, x = export(net), torch.randn(3, 16)
    assert [type(layer) for layer in made] == [SparseLinear, Scaled, nn.Linear]
    torch.testing.assert_close(made(x), net(x))


@for_each("build", [lambda: nn.Linear(16, 8), lambda: nn.Conv2d(4, 8, 3)])
def test_autocast_and_empty_batches_are_as_those_of_the_layer(build) -> None:
    layer = thinned(build(), 0.2)
    made = export(layer)
    x = torch.randn(2, *((16,) if isinstance(layer, nn.Linear) else (4, 6, 6)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(made(x), layer(x).float(), rtol=0.02, atol=0.02)
    assert made(x[:0]).shape == layer(x[:0]).shape


def test_a_damaged_state_is_refused() -> None:
    made = export(thinned(nn.Linear(16, 8), 0.2), "csr")
    state = made.state_dict()
    for name, change, said in (
        ("columns", lambda c: c + 16, "columns go from"),
        ("columns", lambda c: c - 99, "columns go from"),
        ("columns", lambda c: c[:-1], "rows do not divide"),
        ("columns", lambda c: c.long(), "not a vector of torch.int32"),
        ("values", lambda v: v[1:], "values are"),
        ("values", lambda v: v.double(), "not a vector of torch.float32"),
        ("rows", lambda r: r[:-1], "rows has 8 elements in place of 9"),
        ("rows", lambda r: r.flip(0), "rows do not divide"),
        ("rows", lambda r: r + 1, "rows do not divide"),
    ):
        key = f"weight.{name}"
        refuses(StateError, said, made.load_state_dict, state | {key: change(state[key].clone())})


@for_each("form", ["csr", "2:4"])
def test_the_state_of_another_shape_is_refused(form) -> None:
    def exported(outputs: int) -> nn.Module:
        layer = nn.Linear(16, outputs)
        layer.weight.data.view(-1, 4)[:, 2:] = 0
        return export(layer, form)

    with pytest.raises(StateError, match=f"not fit a {form} weight of 8 x 16"):
        exported(8).load_state_dict(exported(4).state_dict())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_without_inputs_is_exported() -> None:
    layer = nn.Sequential(nn.Linear(0, 3))
    assert torch.equal(export(layer)(torch.empty(2, 0)), layer(torch.empty(2, 0)))
