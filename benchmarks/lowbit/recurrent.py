"""Few-bit training of an LSTM on Shakespeare, beside float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common.letters import train, train_all
from benchmarks.common.machine import machine
from benchmarks.lowbit.__main__ import RUNS
from laconic.core.spec import parse
from laconic.lowbit import pack
from laconic.tools.tasks.shakespeare import load

STEPS = 400
RATES = {  # peak rates: each is better than its double and its half at seed 0
    "float": 0.04,
    "binarise(first='binary')": 0.16,
    "quantise(weights=4, activations=4, gradients=None, first='binary')": 0.04,
}


def shakespeare(seeds: Sequence[int], quick: bool) -> None:
    """Run every training that is not stored yet."""
    train_all(RUNS, "shakespeare/{spec}-{seed}", RATES, seeds, trained, STEPS, quick=quick)


def trained(method: str, seed: int, steps: int) -> dict[str, Any]:
    """Return the row of one training."""

    def attach(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return None if method == "float" else parse(method).attach(model, optimizer)

    model, handle, row = train(seed, RATES[method], attach, steps)
    if handle is not None:
        x = load()["test_x"][:100].long()
        with torch.no_grad():
            row |= {"flips": handle.flips(), "same_bits": torch.equal(pack(model)(x), model(x))}
    return {"method": method} | row | {"machine": machine()}
