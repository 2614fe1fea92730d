"""Seconds of a step of this training over three links, as `laconic plan` forecasts them.

    python -m benchmarks.resnet9.forecast    writes benchmarks/resnet9/forecasts.json

The step without communication is measured here, by one thread: a median. What methods send and compute is
rehearsed as in `laconic plan`, with the model's own tensors.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import torch

from benchmarks.common.machine import machine
from benchmarks.resnet9.__main__ import BATCH, METHODS, STEPS, WORKERS, Run
from benchmarks.resnet9.model import resnet9
from benchmarks.resnet9.rank import PEAK
from laconic.core.layout import Layout
from laconic.core.units import bits_a_second
from laconic.tools.plan.contenders import contenders, rehearse_all
from laconic.tools.plan.network import Network
from laconic.tools.plan.step import Work, buckets, time_line

FILE = Path(__file__).with_name("forecasts.json")
LINKS = ("100mbit", "1gbit", "10gbit")
WIDTH, TIMED = 16, 15


def main() -> None:
    """Measure, forecast, print, and write the file."""
    torch.set_num_threads(1)
    model = resnet9(WIDTH).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    forward, backward = computing(model)
    layout = Layout.of((name, tuple(each.shape)) for name, each in model.named_parameters())
    work = Work(forward, backward, 0.0, buckets(4 * layout.numel), cores=1.0)
    specs = {Run(method, PEAK).spec: method for method in METHODS}
    asked = contenders([*specs])
    names = {repr(each): spec for each, spec in zip(asked, specs, strict=True)}
    steps = {}
    for each in rehearse_all(asked, layout):
        lines = {
            link: time_line(work, each, Network(bits_a_second("link", link) / 8), WORKERS) for link in LINKS
        }
        steps[specs[names[each.spec]]] = {link: round(line.step_s, 5) for link, line in lines.items()}
        told = ", ".join(f"{1e3 * line.step_s:.0f} ms at {link}" for link, line in lines.items())
        print(f"{each.spec:44} {told}", flush=True)
    found = {"forward_s": forward, "backward_s": backward, "steps": STEPS, "step_s": steps}
    FILE.write_text(json.dumps(found | {"machine": machine()}, indent=1) + "\n")


def computing(model: torch.nn.Module) -> tuple[float, float]:
    """Return the seconds of forward and backward of one worker's images, with one thread."""
    x = torch.randn(BATCH // WORKERS, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    times = []
    for _ in range(TIMED):
        began = time.process_time()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        between = time.process_time()
        loss.backward()
        times.append((between - began, time.process_time() - between))
    forward, backward = (statistics.median(each) for each in zip(*times, strict=True))
    return forward, backward


if __name__ == "__main__":
    main()
