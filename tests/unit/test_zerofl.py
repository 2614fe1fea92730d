"""ZeroFL's uplink masks: what is sent, what the server makes of it, and the paper's sizes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from laconic.core.errors import SpecError, WireError
from laconic.core.layout import Layout
from laconic.federated.zerofl import DiffOnTopWeights, TopDiff, TopWeights, Uplink, csr_nbytes
from laconic.sparsity import swat

LAYOUT = Layout.of([("first", (3, 4)), ("a", (10, 10)), ("bias", (10,)), ("b", (7, 9))])
SPARSE = ("a", "b")
MASKS = (TopWeights, DiffOnTopWeights, TopDiff)
ROUNDING = {"rtol": 1e-6, "atol": 1e-6}


def normal(seed: int, n: int = LAYOUT.numel) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def top(x: list[float], count: int) -> set[int]:
    return set(sorted(range(len(x)), key=lambda i: -abs(x[i]))[:count])


def sent(mask: str, start: Tensor, end: Tensor, rho: float) -> Tensor:
    """What the paper sends, an entry at a time; everything of what is not sparse."""
    w, e = start.tolist(), end.tolist()
    out = list(e) if mask == "TopWeights" else [y - x for x, y in zip(w, e, strict=True)]
    for name in SPARSE:
        entry = LAYOUT[name]
        span = range(entry.offset, entry.offset + entry.numel)
        chosen_by = [e[i] - w[i] if mask == "TopDiff" else e[i] for i in span]
        kept = top(chosen_by, math.ceil(rho * entry.numel - 1e-9))
        for j, i in enumerate(span):
            if j not in kept:
                out[i] = 0.0
    return torch.tensor(out)


@pytest.mark.parametrize("make", MASKS)
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.2, 0.9])
def test_a_mask_sends_what_the_paper_sends(make, ratio) -> None:
    mask = make(sparsity=0.9, mask_ratio=ratio)
    uplink, start, end = Uplink(mask, LAYOUT, SPARSE), normal(0), normal(0) + 0.1 * normal(1)
    before = start.clone(), end.clone()
    decoded = uplink.decode(uplink.encode(start, end))
    torch.testing.assert_close(decoded, sent(make.__name__, start, end, 0.1 + ratio), **ROUNDING)
    assert torch.equal(start, before[0]) and torch.equal(end, before[1])


@pytest.mark.parametrize("make", MASKS)
def test_the_server_averages_by_examples_and_what_is_missing_is_zero(make) -> None:
    uplink, start = Uplink(make(0.9, 0.1), LAYOUT, SPARSE), normal(0)
    ends = [start + 0.3 * normal(seed) for seed in (1, 2, 3)]
    wires, examples = [uplink.encode(start, end) for end in ends], [10, 30, 60]
    mean = sum(n / 100 * sent(make.__name__, start, end, 0.2) for n, end in zip(examples, ends, strict=True))
    expected = mean if make is TopWeights else start + mean
    torch.testing.assert_close(uplink.next_weights(start, wires, examples), expected, **ROUNDING)


@pytest.mark.parametrize("make", MASKS)
def test_the_whole_ratio_is_plain_averaging(make) -> None:
    uplink, start = Uplink(make(0.9, 0.9), LAYOUT, SPARSE), normal(0)
    ends = [start + normal(seed) for seed in (1, 2)]
    wires = [uplink.encode(start, end) for end in ends]
    found = uplink.next_weights(start, wires, [1, 3])
    torch.testing.assert_close(found, 0.25 * ends[0] + 0.75 * ends[1], rtol=1e-5, atol=1e-5)


def test_the_masks_differ_where_weights_and_differences_do() -> None:
    layout, start = Layout.of([("w", (4,))]), torch.tensor([5.0, -4.0, 0.1, 0.0])
    end = torch.tensor([5.5, -4.0, 2.1, 0.0])
    found = {
        make.__name__: (lambda up: up.decode(up.encode(start, end)))(
            Uplink(make(sparsity=0.5, mask_ratio=0.0), layout, ["w"])
        ).tolist()
        for make in MASKS
    }
    assert found["TopWeights"] == [5.5, -4.0, 0.0, 0.0]
    assert found["DiffOnTopWeights"] == [0.5, 0.0, 0.0, 0.0]
    assert found["TopDiff"] == pytest.approx([0.5, 0.0, 2.0, 0.0])


@pytest.mark.parametrize("make", MASKS)
def test_damaged_messages_are_refused_or_decode(make) -> None:
    uplink, start = Uplink(make(0.9, 0.0), LAYOUT, SPARSE), normal(0)
    wire = uplink.encode(start, start + normal(1))
    for cut in (0, 1, 50, wire.numel() - 1):
        with pytest.raises(WireError):
            uplink.decode(wire[:cut])
    with pytest.raises(WireError):
        uplink.decode(torch.cat([wire, wire[:1]]))
    nan = wire.clone()
    nan[:4] = torch.tensor([float("nan")]).view(torch.uint8)
    with pytest.raises(WireError):
        uplink.next_weights(start, [nan], [1])


def test_wrong_arguments_are_refused() -> None:
    for make in MASKS:
        with pytest.raises(SpecError, match="sparsity must be"):
            make(sparsity=1.0)
        with pytest.raises(SpecError, match="mask_ratio must be"):
            make(sparsity=0.9, mask_ratio=0.95)
        with pytest.raises(SpecError, match="mask_ratio must be"):
            make(mask_ratio=-0.1)
    with pytest.raises(SpecError, match="no 'other'"):
        Uplink(TopDiff(), LAYOUT, ["a", "other"])
    with pytest.raises(SpecError, match="no tensor is masked"):
        Uplink(TopDiff(), LAYOUT, [])
    uplink, start = Uplink(TopDiff(), LAYOUT, SPARSE), normal(0)
    wire = uplink.encode(start, start)
    for examples in ([], [1, 2], [0]):
        with pytest.raises(SpecError, match="examples"):
            uplink.next_weights(start, [wire], examples)
    with pytest.raises(SpecError, match="examples"):
        uplink.next_weights(start, [], [])


def resnet18() -> nn.Module:
    """ResNet-18 for CIFAR-10's small images, as a flat list of layers: only its shapes matter here."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, bias=False), nn.BatchNorm2d(64)]
    inside = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            for _ in range(2):
                layers += [nn.Conv2d(inside, width, 3, bias=False), nn.BatchNorm2d(width)]
                before, inside = inside, width
            if block == 0 and width > 64:
                layers += [nn.Conv2d(width // 2, width, 1, bias=False), nn.BatchNorm2d(width)]
    assert before == inside
    return nn.Sequential(*layers, nn.Linear(512, 10))


SIZES = [
    (0.9, 0.0, 10.1, 5.7),
    (0.9, 0.1, 18.7, 10.3),
    (0.9, 0.2, 27.3, 14.8),
    (0.95, 0.0, 5.9, 3.3),
    (0.95, 0.1, 14.4, 8.0),
    (0.95, 0.2, 23.0, 12.6),
]


def resnet_tensors() -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Shapes of all parameters and float buffers; names of the sparse weights: 3 x 3, but not the first."""
    model = resnet18()
    assert sum(part.numel() for part in model.parameters()) == 11_173_962
    one_by_one = [n for n, m in model.named_modules() if getattr(m, "kernel_size", None) == (1, 1)]
    handle = swat(model, keep=[*one_by_one, str(len(model) - 1)])
    assert len(handle.weights) == 16
    parts = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    floats = {name: tuple(part.shape) for name, part in parts.items() if part.is_floating_point()}
    return floats, list(handle.weights)


def test_the_sizes_of_the_paper() -> None:
    """In units of 1,024,000 bytes, that of the whole model (43.7) too."""
    shapes, sparse = resnet_tensors()
    assert f"{4 * sum(map(math.prod, shapes.values())) / 1.024e6:.1f}" == "43.7"
    for sparsity, ratio, printed, _ in SIZES:
        mask = TopWeights(sparsity, ratio)
        assert f"{csr_nbytes(shapes, sparse, mask.density) / 1.024e6:.1f}" == f"{printed:.1f}"


def test_the_sizes_on_our_page() -> None:
    shapes, sparse = resnet_tensors()
    layout = Layout.of(shapes.items())
    start, end = normal(0, layout.numel), normal(1, layout.numel)
    page = (Path(__file__).parents[2] / "docs" / "sparse_training.md").read_text()
    for sparsity, ratio, printed, ours in SIZES:
        wire = Uplink(TopDiff(sparsity, ratio), layout, sparse).encode(start, end)
        assert f"{wire.numel() / 1.024e6:.1f}" == f"{ours:.1f}"
        assert f"| {100 * sparsity:g} % | {ratio:g} | {printed:.1f} | {ours:.1f} |" in page
