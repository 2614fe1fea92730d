"""Seconds of a step of this training over three links, as `laconic plan` forecasts them.

    python -m benchmarks.resnet9.forecast    writes benchmarks/resnet9/forecasts.json

Forward and backward are measured here, by one thread.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common.forecasts import computing, step_seconds, write
from benchmarks.resnet9.__main__ import BATCH, METHODS, STEPS, WORKERS, Run
from benchmarks.resnet9.model import resnet9
from benchmarks.resnet9.rank import PEAK

FILE = Path(__file__).with_name("forecasts.json")
WIDTH = 16


def main() -> None:
    """Measure, forecast, print, and write the file."""
    torch.set_num_threads(1)
    model = resnet9(WIDTH).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(BATCH // WORKERS, 3, 32, 32).contiguous(memory_format=torch.channels_last)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = model(x).float().square().mean()
        return out

    computes = computing(model, loss)
    methods = {Run(method, PEAK).spec: method for method in METHODS}
    found = step_seconds([*methods], model, computes, WORKERS)
    write(FILE, computes, {methods[spec]: seconds for spec, seconds in found.items()}, steps=STEPS)


if __name__ == "__main__":
    main()
