"""Seconds of a training step over a link, as `laconic plan` forecasts them.

What methods send and compute is rehearsed with the model's own tensors, as in `laconic plan`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor, nn

from benchmarks.common.machine import machine
from laconic.core.layout import Layout
from laconic.core.units import bits_a_second
from laconic.strategies.distribute import strategy_or_method
from laconic.tools.plan.contenders import rehearse_all
from laconic.tools.plan.network import Network
from laconic.tools.plan.step import Work, buckets, time_line

LINKS = ("100mbit", "1gbit", "10gbit")
TIMED, DISCARDED = 15, 3


def computing(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[float, float]:
    """Return the median CPU seconds of forward and of backward, after a few calls."""
    times = []
    for _ in range(DISCARDED + TIMED):
        model.zero_grad()
        began = time.process_time()
        found = loss()
        between = time.process_time()
        found.backward()
        times.append((between - began, time.process_time() - between))
    forward, backward = (statistics.median(each) for each in zip(*times[DISCARDED:], strict=True))
    return forward, backward


def step_seconds(
    specs: Sequence[str], model: nn.Module, computes: tuple[float, float], workers: int
) -> dict[str, dict[str, float]]:
    """Print and return the seconds of a step by spec and link, for hosts with one core each."""
    layout = Layout.of((name, tuple(each.shape)) for name, each in model.named_parameters())
    work = Work(*computes, 0.0, buckets(4 * layout.numel), cores=1.0)
    by_spec = {spec: strategy_or_method(spec) for spec in specs}
    names = {repr(each): spec for spec, each in by_spec.items()}
    found = {}
    for each in rehearse_all([*by_spec.values()], layout):
        lines = {
            link: time_line(work, each, Network(bits_a_second("link", link) / 8), workers) for link in LINKS
        }
        found[names[each.spec]] = {link: round(line.step_s, 5) for link, line in lines.items()}
        told = ", ".join(f"{1e3 * line.step_s:.0f} ms at {link}" for link, line in lines.items())
        print(f"{each.spec:44} {told}", flush=True)
    return found


def write(path: Path, computes: tuple[float, float], steps: dict[str, dict[str, float]], **rest: int) -> None:
    """Write forecasts with what they rest on."""
    forward, backward = computes
    found = {"forward_s": forward, "backward_s": backward, **rest, "step_s": steps, "machine": machine()}
    path.write_text(json.dumps(found, indent=1) + "\n")
