"""ZeroFL's uplink masks: what is sent, what the server makes of it, and the paper's sizes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.unit.shared import for_each, refuses
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


@for_each("make", MASKS)
@for_each("ratio", [0.0, 0.1, 0.2, 0.9])
def test_a_mask_sends_what_the_paper_sends(make, ratio) -> None:
    mask = make(sparsity=0.9, mask_ratio=ratio)
    uplink, start, end = Uplink(mask, LAYOUT, SPARSE), normal(0), normal(0) + 0.1 * normal(1)
    before = start.clone(), end.clone()
    decoded = uplink.decode(uplink.encode(start, end))
    torch.testing.assert_close(decoded, sent(make.__name__, start, end, 0.1 + ratio), **ROUNDING)
    assert torch.equal(start, before[0]) and torch.equal(end, before[1])


@for_each("make", MASKS)
def test_the_server_averages_by_examples_and_what_is_missing_is_zero(make) -> None:
    """The whole ratio is plain averaging."""
    uplink, start, examples = Uplink(make(0.9, 0.1), LAYOUT, SPARSE), normal(0), [10, 30, 60]
    ends = [start + 0.3 * normal(seed) for seed in (1, 2, 3)]
    mean = sum(n / 100 * sent(make.__name__, start, end, 0.2) for n, end in zip(examples, ends, strict=True))
    expected = mean if make is TopWeights else start + mean
    found = uplink.next_weights(start, [uplink.encode(start, end) for end in ends], examples)
    torch.testing.assert_close(found, expected, **ROUNDING)
    whole = Uplink(make(0.9, 0.9), LAYOUT, SPARSE)
    found = whole.next_weights(start, [whole.encode(start, end) for end in ends[:2]], [1, 3])
    torch.testing.assert_close(found, 0.25 * ends[0] + 0.75 * ends[1], rtol=1e-5, atol=1e-5)


def test_the_masks_differ_where_weights_and_differences_do() -> None:
    layout, start = Layout.of([("w", (4,))]), torch.tensor([5.0, -4.0, 0.1, 0.0])
    end, rows = torch.tensor([5.5, -4.0, 2.1, 0.0]), ([5.5, -4.0, 0, 0], [0.5, 0, 0, 0], [0.5, 0, 2.0, 0])
    for make, expected in zip(MASKS, rows, strict=True):
        uplink = Uplink(make(sparsity=0.5, mask_ratio=0.0), layout, ["w"])
        assert uplink.decode(uplink.encode(start, end)).tolist() == pytest.approx(expected), make


@for_each("make", MASKS)
def test_damaged_messages_are_refused_or_decode(make) -> None:
    uplink, start = Uplink(make(0.9, 0.0), LAYOUT, SPARSE), normal(0)
    wire = uplink.encode(start, start + normal(1))
    for cut in (0, 1, 50, wire.numel() - 1):
        refuses(WireError, ".", uplink.decode, wire[:cut])
    refuses(WireError, ".", uplink.decode, torch.cat([wire, wire[:1]]))
    nan = wire.clone()
    nan[:4] = torch.tensor([float("nan")]).view(torch.uint8)
    refuses(WireError, ".", uplink.next_weights, start, [nan], [1])


def test_wrong_arguments_are_refused() -> None:
    for make in MASKS:
        refuses(SpecError, "sparsity must be", make, sparsity=1.0)
        refuses(SpecError, "mask_ratio must be", make, sparsity=0.9, mask_ratio=0.95)
        refuses(SpecError, "mask_ratio must be", make, mask_ratio=-0.1)
    refuses(SpecError, "no 'other'", Uplink, TopDiff(), LAYOUT, ["a", "other"])
    refuses(SpecError, "no tensor is masked", Uplink, TopDiff(), LAYOUT, [])
    uplink, start = Uplink(TopDiff(), LAYOUT, SPARSE), normal(0)
    wire = uplink.encode(start, start)
    for wires, examples in (([wire], []), ([wire], [1, 2]), ([wire], [0]), ([], [])):
        refuses(SpecError, "examples", uplink.next_weights, start, wires, examples)


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


def test_the_sizes_of_the_paper_and_on_our_page() -> None:
    """In units of 1,024,000 bytes, that of the whole model (43.7) too."""
    shapes, sparse = resnet_tensors()
    layout = Layout.of(shapes.items())
    start, end = normal(0, layout.numel), normal(1, layout.numel)
    page = (Path(__file__).parents[2] / "docs" / "sparse_training.md").read_text()
    assert f"{4 * sum(map(math.prod, shapes.values())) / 1.024e6:.1f}" == "43.7"
    for sparsity, ratio, printed, ours in SIZES:
        mask, wire = TopWeights(sparsity, ratio), Uplink(TopDiff(sparsity, ratio), layout, sparse)
        assert f"{csr_nbytes(shapes, sparse, mask.density) / 1.024e6:.1f}" == f"{printed:.1f}"
        assert f"{wire.encode(start, end).numel() / 1.024e6:.1f}" == f"{ours:.1f}"
        assert f"| {100 * sparsity:g} % | {ratio:g} | {printed:.1f} | {ours:.1f} |" in page
