"""Cases of the laws: every registered spec of a kind, sizes and inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from laconic.core.codec import Codec
from laconic.core.layout import Segments
from laconic.core.spec import Spec, find, names, parse
from laconic.exchange.method import Paper
from laconic.reducers import Reducer
from tests import cases as cases_module

SIZES = (0, 1, 2, 7, 100, 1001, 65537)
INPUTS = ("normal", "heavy", "zeros", "constant", "spike", "denormal", "huge")
USUAL = ("normal", "heavy", "zeros", "constant", "spike")  # zero or in the normal range of float16


def specs(kind: type[Spec]) -> list[str]:
    """Every registered class of a kind, by its examples: a new one is tested by being registered."""
    found: list[str] = []
    for name in names():
        maker = find(name)
        if isinstance(maker, type) and issubclass(maker, kind):
            found += maker.examples or (f"{name}()",)
    assert found, f"no {kind.__name__} is registered"
    return [repr(parse(text)) for text in found]


def compressors() -> list[str]:
    """Every registered method, and every reducer that `compress` lifts to one."""
    makers = ((name, find(name)) for name in names())
    papers = [maker.examples or (f"{name}()",) for name, maker in makers if isinstance(maker, Paper)]
    return [repr(parse(text)) for texts in papers for text in texts] + specs(Reducer)


def first_of_each(examples: list[str]) -> list[str]:
    """Return the first example of each name, or with `--full` all examples: for laws that take long."""
    first: dict[str, str] = {}
    for spec in examples:
        first.setdefault(spec.partition("(")[0], spec)
    return examples if cases_module.full else list(first.values())


def listed(text: str) -> list[str]:
    """Return the specs of a text, one per line or separated by semicolons."""
    return [each.strip() for each in text.replace("\n", ";").split(";") if each.strip()]


def given(name: str, n: int) -> Tensor:
    """Input float32 (n,) of a kind, the same in every call."""
    rng = torch.Generator().manual_seed(n)
    x = torch.zeros(n, dtype=torch.float32, device="cpu")
    if name == "normal":
        x = torch.randn(n, generator=rng)
    elif name == "heavy":
        x = torch.randn(n, generator=rng) / torch.rand(n, generator=rng).clamp_(min=1e-3)
        x[x.abs() < 1e-3] = 1e-3
    elif name == "constant":
        x = torch.full((n,), -0.37)
    elif name == "spike" and n:
        x[n // 3] = 1000.0
    elif name == "denormal":
        x = torch.randn(n, generator=rng) * 1e-41
    elif name == "huge":
        x = torch.randn(n, generator=rng).sign() * 3.4028e38
    return x


def cases(inputs: tuple[str, ...] = INPUTS, sizes: tuple[int, ...] = SIZES) -> Iterator[tuple[str, Tensor]]:
    """Every input in every size, with a label for failures."""
    for n in sizes:
        for name in inputs:
            yield f"{name}, n={n}", given(name, n)


def decoded(codec: Codec, x: Tensor, draws: int) -> Tensor:
    """Return the decoded x (n,) for the keys 0, 1, ...: float32 (draws, n).

    One message of equal tensors has the values of a wire for each (`test_messages`).
    """
    segments = Segments.consecutive([x.numel()] * draws)
    wire = codec.encode_segments(x.repeat(draws), segments, range(draws))
    return codec.decode_segments_add_(wire, segments, torch.zeros(draws * x.numel())).view(draws, x.numel())


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, so that -0.0 differs from 0.0 and NaN equals itself."""
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(*(each.flatten().view(torch.uint8) for each in (a, b)))
