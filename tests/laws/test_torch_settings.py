"""Torch's global settings change nothing: each law has the same bits under every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from laconic.comm.loopback import Loopback
from laconic.core.codec import Codec
from laconic.core.layout import Segments
from laconic.core.spec import parse
from laconic.exchange.method import lift
from laconic.strategies.strategy import Strategy

from . import strategy_ranks, transform_laws
from .method_ranks import Rank
from .table import compressors, given, specs
from .torch_settings import SETTINGS, evaluating, in_thread, opened, torch_setting

CODECS, METHODS = specs(Codec), compressors()
STRATEGIES = [spec for spec in specs(Strategy) if not strategy_ranks.is_clocked(spec)]
Law = Callable[[str, str], list[Tensor]]  # of a spec and a setting


def coded(spec: str, setting: str) -> list[Tensor]:
    """Two wires of a codec, and what they are decoded to."""
    codec, x = parse(spec), given("heavy", 1001)
    segments = Segments.consecutive([1, 700, 300])
    with torch_setting(setting), in_thread(setting), evaluating(setting):
        wires = [codec.encode(x, key=3), codec.encode_segments(x, segments, [4, 5, 6])]
        sums = torch.zeros(1001, dtype=torch.float32, device="cpu")
        codec.decode_segments_add_(wires[1], segments, sums, alpha=0.5)
        return [*wires, codec.decode(wires[0], 1001), sums]


def exchanged(spec: str, setting: str) -> list[Tensor]:
    """Parameters and memory after training by a method with a resume in the middle."""
    begin = lift(spec).warm_at

    def play(comm: Loopback) -> list[Tensor]:
        with in_thread(setting):
            first, second = Rank(spec, comm, begin), Rank(spec, comm, begin)
            first.train(range(begin, begin + 3))
            with evaluating(setting):
                second.take_over(first)
            second.train(range(begin + 3, begin + 6))
            with evaluating(setting):
                memory = second.memory()
            for rank in (first, second):
                rank.close()
            return [second.flat, *(memory[key] for key in sorted(memory))]

    with torch_setting(setting):
        return [each for end in Loopback.run(2, play) for each in end]


def trained(spec: str, setting: str) -> list[Tensor]:
    """Parameters after training by a strategy with a resume in the middle, and after `finish`."""
    size = next(size for size in (2, 4) if strategy_ranks.fits(spec, size))

    def play(comm: Loopback) -> list[Tensor]:
        with in_thread(setting):
            first, second = (strategy_ranks.Rank(spec, comm) for _ in range(2))
            first.train(range(5))
            with evaluating(setting):
                second.optimizer.load_state_dict(first.optimizer.state_dict())
            second.train(range(5, 11))
            before = second.flat
            with evaluating(setting):
                second.optimizer.stats()
                second.optimizer.finish()
            after = second.flat
            second.train([11])  # goes on after finish()
            for rank in (first, second):
                rank.optimizer.finish()
                rank.optimizer.remove()
            return [before, after, second.flat]

    with torch_setting(setting):
        return [each for end in Loopback.run(size, play) for each in end]


def transformed(name: str, setting: str) -> list[Tensor]:
    """The end of a training by everything that is no exchange between ranks."""
    return transform_laws.LAWS[name](lambda: opened(setting), lambda: evaluating(setting))


LAWS: dict[str, tuple[Law, list[str]]] = {
    "codec": (coded, CODECS),
    "method": (exchanged, METHODS),
    "strategy": (trained, STRATEGIES),
    "transform": (transformed, [*transform_laws.LAWS]),
}
CASES = [(kind, spec) for kind, (_, names) in LAWS.items() for spec in names]


def same_under(kind: str, spec: str, settings: Iterable[str]) -> None:
    """Assert that these settings change no bit, shape or dtype."""
    law, _ = LAWS[kind]
    wanted = law(spec, "")
    for setting in settings:
        case = f"{kind} {spec} under {setting}"
        try:
            found = law(spec, setting)
        except Exception as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
        assert [each.dtype for each in found] == [each.dtype for each in wanted], case
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), case


def test_global_settings_of_torch_change_no_bit() -> None:
    """Every name under one setting in turn, by its first example: each setting with each kind of law."""
    first = {
        (kind, spec.partition("(")[0]): spec for kind, spec in reversed(CASES) if not adaptive(kind, spec)
    }
    for i, ((kind, _), spec) in enumerate(sorted(first.items())):
        same_under(kind, spec, [SETTINGS[i % len(SETTINGS)]])


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "spec"), CASES)
def test_no_spec_changes_a_bit_under_any_setting(kind: str, spec: str) -> None:
    if not adaptive(kind, spec):
        same_under(kind, spec, SETTINGS)


def adaptive(kind: str, spec: str) -> bool:
    """Whether a method decides by clocks, so that no two runs are alike."""
    return kind == "method" and lift(spec).adaptive
