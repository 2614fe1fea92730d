"""Change coding without a network: the error of what arrives at the next stage, by epoch.

    python -m benchmarks.change_coding           writes benchmarks/change_coding/results.json
    python -m benchmarks.change_coding --quick   one seed and fewer samples; writes nothing

Activations are normal, 16 samples of (32, 64), and change by 0.1 * 0.73^epoch of themselves in each epoch:

    settling     change(codec) beside the codec itself
    dropout      the same under a fresh dropout mask in each epoch, which is what jumps
    keeping      the same with buffers that are rounded
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.machine import machine
from laconic.core.spec import parse
from laconic.data.memory import InRam
from laconic.pipeline.changes import Changes
from laconic.pipeline.channel import Channel, Coded, Visit
from laconic.pipeline.codings.change import Change

RESULTS = Path(__file__).with_name("results.json")
SAMPLES, LONG, WIDE, EPOCHS = 16, 32, 64, 9
SPECS = ("minmax(bits=2, block=64)", "minmax(bits=4, block=64)")
DROPS = (0.0, 0.01, 0.1)
KEEPS = ("dense()", "cast(dtype='fp16')", "minmax(bits=8, block=64)", "minmax(bits=4, block=64)")
Activations = Callable[[int], Tensor]  # of an epoch, (samples, long, wide)


def main() -> None:
    """Measure, print, write the JSON."""
    options = argparse.ArgumentParser(prog="benchmarks.change_coding")
    options.add_argument("--quick", action="store_true", help="one seed; writes nothing")
    quick = options.parse_args().quick
    torch.set_num_threads(1)
    seeds = range(1 if quick else 3)
    changes = [f"change({spec}, first='fp32')" for spec in SPECS]
    made = {
        "settling": [row(spec, seeds) for pair in zip(changes, SPECS, strict=True) for spec in pair],
        "dropout": [row(spec, seeds, drop=drop) for spec in changes for drop in DROPS],
        "keeping": [row(changes[1], seeds, keep=keep) for keep in KEEPS],
    }
    for name, rows in made.items():
        for each in rows:
            print(name, each["spec"], each["drop"], each["keep"], *(f"{e:.4f}" for e in each["errors"]))
    if not quick:
        RESULTS.write_text(json.dumps({"machine": machine(), **made}, indent=1) + "\n")


def row(spec: str, seeds: range, drop: float = 0.0, keep: str = "dense()") -> dict[str, Any]:
    """Relative errors |arrived - a| / |a| by epoch, the mean over seeds."""
    by_seed = [errors(spec, keep, settling(seed, drop)) for seed in seeds]
    means = [sum(each) / len(by_seed) for each in zip(*by_seed, strict=True)]
    return {"spec": spec, "drop": drop, "keep": keep, "seeds": len(by_seed), "errors": means}


def settling(seed: int, drop: float) -> Activations:
    """Activations whose change shrinks, under a fresh mask in each epoch."""

    def at(epoch: int) -> Tensor:
        rng = torch.Generator().manual_seed(seed)
        x = torch.randn(SAMPLES, LONG, WIDE, generator=rng)
        for past in range(epoch + 1):
            x = x + 0.1 * 0.73**past * torch.randn(x.shape, generator=rng)
        mask = torch.rand(x.shape, generator=rng.manual_seed(1000 * seed + epoch)) >= drop
        return x * mask / (1 - drop)

    return at


def errors(spec: str, keep: str, activations: Activations) -> list[float]:
    """Relative errors by epoch of what arrives, with both sides of a boundary in this process."""
    sender, receiver = side(spec, keep), side(spec, keep)
    found = []
    for epoch in range(EPOCHS):
        a = activations(epoch)
        visit, arrived = Visit(epoch, 0, torch.arange(SAMPLES)), torch.zeros_like(a)
        receiver.decode_(sender.encode(a, visit), arrived, visit)
        found.append(float((arrived - a).norm() / a.norm()))
    return found


def side(spec: str, keep: str) -> Channel:
    """One side of a boundary."""
    coding, shape = parse(spec), torch.Size((SAMPLES, LONG, WIDE))
    if not isinstance(coding, Change):
        return Coded("0>1:0", shape, torch.float32, 0, coding)

    def rows(name: str, nbytes: int) -> InRam:
        return InRam(SAMPLES, nbytes)

    return Changes("0>1:0", shape, torch.float32, 0, coding, parse(keep), SAMPLES, rows)


if __name__ == "__main__":
    main()
