"""SWAT: sparse weights forward, sparse inputs kept for backward, against the same rule with dense masks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from tests.unit.shared import for_each, refuses, resumed, same
from torch import Tensor, nn

from laconic.core.errors import AttachError, SpecError, StateError
from laconic.sparsity import SwatConv2d, SwatLinear, swat
from laconic.sparsity.bitmask import pack, threshold, unpack
from laconic.sparsity.thresholds import Thresholds

EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64 sums in another order


def top(x: Tensor, share: float) -> Tensor:
    """x with only its ceil(share * n) largest entries, by a sort of Python's own."""
    flat = x.detach().flatten().tolist()
    count = -int(-share * len(flat) // 1)
    best = set(sorted(range(len(flat)), key=lambda i: -abs(flat[i]))[:count])
    kept = [value if i in best else 0.0 for i, value in enumerate(flat)]
    return torch.tensor(kept, dtype=x.dtype).view(x.shape)


def by_masks(product, x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor, share: float) -> list:
    """y, dx, dw and db of the rule: two plain products, each of which gives one gradient."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    bias = None if bias is None else bias.detach().requires_grad_()
    y = product(x, top(weight, share), bias)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    db = [] if bias is None else [*torch.autograd.grad(y, bias, dy)]
    (dw,) = torch.autograd.grad(product(top(x, share), weight, None), weight, dy)
    return [y.detach(), dx, dw, *db]


def ours(layer: nn.Module, x: Tensor, dy: Tensor) -> list:
    x = x.detach().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(part.grad for part in layer.parameters())]


CONVS = [
    {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "padding": 1},
    {"in_channels": 4, "out_channels": 8, "kernel_size": (1, 3), "stride": 2, "groups": 2, "bias": False},
    {"in_channels": 4, "out_channels": 4, "kernel_size": 3, "padding": (2, 0), "dilation": (2, 1)},
]


@for_each("density", [0.1, 0.5])
def test_a_layer_is_two_products_with_masks(density) -> None:
    torch.manual_seed(0)

    def compare(plain, layer, product, x) -> None:
        dy = torch.randn_like(plain(x))
        theirs = by_masks(product, x, plain.weight, plain.bias, dy, density)
        for own, other in zip(ours(layer, x, dy), theirs, strict=True):
            torch.testing.assert_close(own, other, **EXACT)

    for shape in CONVS:
        conv = nn.Conv2d(**shape).double()
        layer = SwatConv2d.of(conv, Thresholds(density, refresh=1))
        x = torch.randn(3, 4, 9, 8, dtype=torch.float64)

        def product(x, weight, bias, conv=conv):
            return F.conv2d(x, weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups)

        compare(conv, layer, product, x)
        torch.testing.assert_close(layer(x[0]), layer(x[:1])[0], **EXACT)
    for ahead in ((6,), (2, 3), ()):
        dense = nn.Linear(7, 5).double()
        layer = SwatLinear.of(dense, Thresholds(density, refresh=1))
        compare(dense, layer, F.linear, torch.randn(*ahead, 7, dtype=torch.float64))


def test_the_input_gradient_is_that_of_finite_differences() -> None:
    """dx is the true slope of what the layer computes; dw is not, by design: it stays dense."""
    torch.manual_seed(0)
    for layer, shape in ((nn.Conv2d(2, 3, 3), (2, 2, 5, 5)), (nn.Linear(6, 4), (3, 6))):
        sparse = {nn.Conv2d: SwatConv2d.of, nn.Linear: SwatLinear.of}[type(layer)](
            layer.double(), Thresholds(0.2, refresh=1)
        )
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(sparse, (x,))
        (dw,) = torch.autograd.grad(sparse(x).sum(), sparse.weight)
        assert (dw != 0).sum() > (0.2 * dw.numel() + 1)


def test_packed_entries_are_the_largest_and_take_their_bytes() -> None:
    torch.manual_seed(0)
    for n in (0, 1, 7, 8, 9, 1000):
        x = torch.randn(n)
        least = threshold(x, max(1, n // 10))
        bits, values = pack(x, least)
        assert bits.dtype is torch.uint8 and bits.numel() == (n + 7) // 8
        assert values.numel() == (max(1, n // 10) if n else 0)
        assert torch.equal(unpack(bits, values, x.shape), torch.where(x.abs() < least, 0.0, x))
    zeros = torch.zeros(50)
    assert pack(zeros, threshold(zeros, 5))[1].numel() == 0, "zeros are never kept"
    assert pack(torch.tensor([float("nan"), 1.0]), 2.0)[1].isnan().all(), "NaN is not hidden"


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 10)
    )


X = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def trained(model: nn.Module, steps: int, first: int = 0) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(first, first + steps):
        x = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(5) % 10).backward()
        optimizer.step()
    return [part.detach().clone() for part in model.parameters()]


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes of all storages that autograd keeps, each once, without parameters."""
    own = {part.untyped_storage().data_ptr() for part in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    del y
    return sum(kept.values())


def test_autograd_keeps_the_bytes_that_are_counted() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, padding=1, bias=False)
    )
    x = torch.randn(8, 4, 16, 16)
    dense = saved_bytes(model, x)
    handle = swat(model, sparsity=0.9, first="sparse")
    kept = saved_bytes(model, x)
    assert handle.dense_bytes() == dense == 2 * x.nbytes
    entries = 2 * -(-x.numel() // 10)
    assert kept == handle.kept_bytes() == 2 * x.numel() // 8 + 4 * entries
    assert kept < 0.14 * dense


def test_a_plain_model_loads_the_state_and_back() -> None:
    model, plain = network(), network()
    before = [*model.parameters()]
    handle = swat(model)
    assert all(own is other for own, other in zip(model.parameters(), before, strict=True))
    assert handle.weights == ("2.weight", "4.weight")
    trained(model, 3)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 8, 8)
    handle.remove()
    assert [type(layer) for layer in model] == [type(layer) for layer in plain]
    assert torch.equal(model.eval()(x), plain.eval()(x))
    handle.remove()
    swat(model)


def test_evaluation_keeps_exactly_the_largest_weights() -> None:
    model = network()
    handle = swat(model, sparsity=0.8)
    trained(model, 13)  # three batches after a refresh
    twin = network().eval()
    twin.load_state_dict(model.state_dict())
    for name in handle.weights:
        part = twin.get_parameter(name)
        part.data = top(part, 0.2)
    x = torch.randn(4, 3, 8, 8)
    model.eval()
    torch.testing.assert_close(model(x), twin(x))
    with torch.no_grad():
        torch.testing.assert_close(model(x), twin(x))
    assert handle.state_dict()["2"]["batches"] == 13, "evaluation counts no batch"


def test_thresholds_are_computed_every_tenth_batch() -> None:
    model = network()
    handle, seen = swat(model, refresh=10), []
    for step in range(21):
        trained(model, 1, step)
        seen.append(handle.state_dict()["4"]["weight"])
    assert len(set(seen)) == 3
    assert len({*seen[:10]}) == len({*seen[10:20]}) == 1
    net = linears(*(nn.Linear(8, 8) for _ in range(3)))
    swat(net, sparsity=0.5, refresh=4)
    net(torch.zeros(0, 8)).sum().backward()
    assert net[1].thresholds.batches == 0, "an empty batch is no refresh"
    net(torch.randn(4, 8)).sum().backward()
    assert net[1].thresholds.batches == 1 and net[1].thresholds.input > 0


def test_a_resumed_training_has_the_same_bits() -> None:
    def start():
        model = network()
        return model, swat(model)

    def train(parts, steps) -> None:
        trained(parts[0], len(steps), steps[0])

    (whole, _), (again, second) = resumed(start, train, 7, 17)
    assert same(whole.parameters(), again.parameters())
    saved = pickle.loads(pickle.dumps(second.state_dict()))
    name = [*saved][-1]
    damaged = [None, {}, {1: 2}, [3], saved | {name: None}, saved | {name: saved[name] | {"batches": "x"}}]
    for state, words in (
        (saved | {"4": saved["4"] | {"refresh": 3}}, "refresh"),
        ({"2": {}, "4": {}}, "not saved by"),
        (saved | {name: saved[name] | {"weight": None}}, "its numbers are"),
        *((state, ".") for state in damaged),
    ):
        refuses(StateError, words, second.load_state_dict, state)
        assert second.state_dict() == saved, "all or nothing"
    refuses(StateError, "density", swat(network(), sparsity=0.5).load_state_dict, saved)
    refuses(StateError, "other sparse layers", swat(network(), first="sparse").load_state_dict, saved)


def test_frozen_weights_keep_no_inputs() -> None:
    model = network()
    handle = swat(model)
    for name in handle.weights:
        model.get_parameter(name).requires_grad_(False)
    trained(model, 1)
    assert handle.kept_bytes() == 0
    assert model.get_parameter("0.weight").grad is not None
    plain, nearly = network(), network()
    swat(nearly, sparsity=1e-9)
    for own, other in zip(trained(nearly, 4), trained(plain, 4), strict=True):
        torch.testing.assert_close(own, other)


def test_copies_and_pickles_work_on_their_own() -> None:
    model = network()
    handle = swat(model)
    trained(model, 2)
    other = copy.deepcopy(model)
    trained(other, 3)
    assert handle.state_dict()["2"]["batches"] == 2
    assert other[2].thresholds.batches == 5
    thawed = pickle.loads(pickle.dumps(model))
    assert torch.equal(thawed.eval()(X), model.eval()(X))


def test_it_learns() -> None:
    model = network()
    swat(model, sparsity=0.8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), torch.arange(5))
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_autocast_computes_in_the_dtype_of_the_weights() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), SwatConv2d.of(nn.Conv2d(4, 4, 3), Thresholds(0.5, 1)))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(X)
        with torch.no_grad():
            assert model(X).dtype == torch.float32
    assert y.dtype == torch.float32
    y.sum().backward()


def test_erk_keeps_the_share_and_what_is_narrow() -> None:
    model = nn.Sequential(nn.Linear(100, 400), nn.Linear(400, 400), nn.Linear(400, 100), nn.Linear(100, 3))
    handle = swat(model, sparsity=0.9, first="sparse", layout="erk")
    assert list(handle.densities) == ["0", "1", "2"], "the narrowest would keep more than all"
    sizes = {name: layer.weight.numel() for name, layer in handle.layers.items()}
    kept = sum(handle.densities[name] * size for name, size in sizes.items()) + 300
    assert kept == pytest.approx(0.1 * (sum(sizes.values()) + 300))
    share = {name: handle.densities[name] * sizes[name] for name in sizes}
    assert share["0"] / 500 == pytest.approx(share["1"] / 800) == pytest.approx(share["2"] / 500)


def linears(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*(layers or (nn.Linear(4, 4) for _ in range(3))))


def tied() -> nn.Module:
    model = linears()
    model[2].weight = model[1].weight
    return model


def hooked() -> nn.Module:
    model = linears()
    model[2].register_forward_hook(lambda *_: None)
    return model


def converted() -> nn.Module:
    model = network()
    swat(model)
    return model


def embedded() -> nn.Module:
    model = linears(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False))
    model[2].weight = model[0].weight
    return model


REFUSED = [
    (tied, "share their weight"),
    (lambda: linears(nn.Linear(4, 4), *[nn.Linear(4, 4)] * 2), "share their weight"),
    (embedded, "share their weight"),
    (hooked, "hooks"),
    (converted, "sparse already"),
    (lambda: linears(nn.ReLU()), "no layer to sparsify"),
    (lambda: linears(nn.Linear(2, 2)), "no layer to sparsify"),
    (lambda: nn.Linear(2, 2), "single layer"),
    (lambda: linears(nn.Linear(2, 2), nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3, padding="same")), "padding of"),
]


@for_each("build, why", REFUSED)
def test_what_cannot_be_treated_is_refused_whole(build, why) -> None:
    model = build()
    before = [type(module) for module in model.modules()]
    refuses(AttachError, why, swat, model)
    assert [type(module) for module in model.modules()] == before, "nothing half converted"


def test_tied_layers_can_stay_dense() -> None:
    model = embedded()
    model.append(nn.Linear(9, 2))
    assert swat(model, keep=("2",)).weights == ("3.weight",)
    named = nn.ModuleDict({"layer": nn.Linear(2, 2)})
    refuses(AttachError, "did you mean", swat, named, keep=("layers",))


def test_wrong_arguments_are_refused() -> None:
    sparsity, layout = "sparsity must be a number in", "layout must be 'uniform' or 'erk'"
    for arguments, why in (
        *(({"sparsity": wrong}, sparsity) for wrong in (0.0, 1.0, float("nan"))),
        ({"refresh": 0}, "refresh must be a whole number"),
        ({"first": "real"}, "first must be 'dense' or 'sparse'"),
        *((wrong, layout) for wrong in ({"layout": "random"}, {"layout": "2:4", "sparsity": 0.5})),
    ):
        refuses(SpecError, why, swat, network(), **arguments)
