"""Seconds of a step of the long trainings of the transformer, as `laconic plan` forecasts them.

    python -m benchmarks.own_rates.forecast    writes benchmarks/own_rates/forecasts.json

Forward and backward are measured here, by one thread.
"""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.common.forecasts import computing, step_seconds, write
from benchmarks.common.small_net import load_windows
from benchmarks.common.workers import WORKERS
from benchmarks.own_rates.families import LONG_GPT

FILE = Path(__file__).with_name("forecasts.json")


def main() -> None:
    """Measure, forecast, print, and write the file."""
    torch.set_num_threads(1)
    problem, data, draws = LONG_GPT.problem, load_windows(), torch.Generator()
    model = problem.build()
    x, y = (data[name][: problem.batch] for name in ("train_x", "train_y"))
    computes = computing(model, lambda: problem.loss(model, x, y, draws))
    write(FILE, computes, step_seconds(LONG_GPT.specs, model, computes, WORKERS))


if __name__ == "__main__":
    main()
