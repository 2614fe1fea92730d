"""docs/precision.md: precision and compression, with figures of benchmarks/precision/results.jsonl."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.common.tables import table
from benchmarks.precision.__main__ import FIRST_SCALE, METHODS, PRECISIONS, SEEDS, STEPS, WORKERS, results

HEAD = """# Precision and compression

`make docs` writes this page from the results of `python -m benchmarks.precision`.

There are three ways to train in 16 bits; each works with every method:

```console
laconic train cifar10 --with "dgc(density=0.01)" --precision bf16    # or fp16
```

```python
# autocast: parameters stay in float32; a scaler for float16 only
scaler = torch.amp.GradScaler("cpu")
handle = laconic.compress(model, optimizer, "dgc(density=0.01)", scaler=scaler)
model, optimizer = laconic.distribute(model, optimizer, "diloco()", scaler=scaler)  # or this

# a model in 16 bits: the optimiser steps float32 masters
model = model.to(torch.bfloat16)
optimizer = laconic.optim.master_weights(torch.optim.AdamW(model.parameters()))
optimizer = laconic.optim.master_weights(optimizer, rounding="stochastic")  # or this: no copy
```

## Dtypes

| tensors | autocast | a model in 16 bits | with master weights |
|---|---|---|---|
| parameters | float32 | 16 bits | 16 bits, and float32 masters |
| gradients, DDP's buckets | float32 | 16 bits | 16 bits |
| a codec's input, memory (residual, momentum) | float32 | float32 | float32 |
| the wire | the method's | the method's | the method's |
| the mean | float32 | float32, rounded to 16 bits | float32 |
| the optimiser's state | float32 | 16 bits | float32 |
| values that a strategy's ranks exchange | float32 | a float32 copy of the parameters | the masters |

Every bucket is compressed in float32, so a model's precision does not change a method's bytes: `dense()`
sends 4 bytes per entry of a bfloat16 model too. `bf16()` and `fp16()` send 2. `fp16()` chooses a power of
two as scale of its wire, so that small gradients are not lost, whatever the loss scale is.

Masters get the mean before it is rounded to the bucket's 16 bits. If a script changes gradients between
`backward()` and `step()`, as clipping does, they get the changed gradients.

## Order of operations

1. The loss is multiplied by the scale S, and so is every gradient.
2. The bucket is divided by S in float32, and checked: if one rank has Inf or NaN, all skip the step.
3. `clip=` of the method clips this rank's gradient.
4. Feedback adds the residual, the codec encodes, ranks compute the mean, feedback updates the residual.
   Memory does not contain S, which may change at any step.
5. The mean is multiplied by S and put into the bucket; `scaler.unscale_(optimizer)` divides by it again, and
   `clip_grad_norm_` clips the mean. Where momentum is applied before the exchange that is a velocity: from
   the next step on momentum is the optimiser's. `dgc` warns of it, and has its own `clip=`.
6. `scaler.step(optimizer)` steps, or skips on all ranks. Masters divide by S in float32: for float16
   parameters torch refuses `unscale_`, so clip them at S times the norm.
7. `scaler.update()` halves S after a skip, on all ranks.

Under a strategy each rank steps by its own gradients. With `distribute(..., scaler=)` ranks share the
scaler's overflow flag, in 4 bytes per step: an overflow on one rank makes all skip that update, and the round
of messages still takes its turn. `adpsgd` and `patience_s` do not wait for every rank at each step, so they
refuse a shared scaler; bfloat16 needs none. [Faults and guarantees](faults.md#non-finite-gradients) describes
the memory after a skip."""

MEASURED = """## Measured

Digits (scikit-learn) with an MLP of 300 thousand parameters, {steps} steps of {workers} x 16 images on a CPU,
SGD with Nesterov momentum at the task's rate, and Adam for 1-bit Adam; all methods share these rates, so
compare the precisions of a method, not the methods; mean over {seeds}. In brackets: the difference from
float32 with the same method, same seeds, and its standard error. The loss scale starts at 2^{power}, sixteen
times torch's, so that it overflows at first."""
READ = """How to read them:

- The difference in brackets is the cost of a precision; the column `fp32` shows the cost of a method.
- A model in bfloat16 alone (`bf16-params`) loses small updates. With masters, or rounded at random, it trains
  like autocast.
- float16 skips steps until the scale fits, and in 100 steps each one matters.
- `diloco` amplifies any rounding in ten rounds of its outer momentum: its differences are as large as those
  between seeds, so the precision is not the cause.
- A 16-bit model sends a little less because DDP cuts buckets by bytes: fewer buckets, and fewer headers.
- Gradients of `dgc` hold velocity, which is larger: in float16 buckets it overflows at a lower scale."""
MISSING = "-"
Rows = Sequence[Mapping[str, Any]]


def page() -> str:
    """The whole page, with what is measured so far."""
    return written(results())


def written(rows: Rows) -> str:
    """The page with these runs."""
    return "\n".join([HEAD, "", *(_measured(rows) if rows else ()), ""])


def _measured(rows: Rows) -> Iterator[str]:
    done = Counter((row["precision"], row["method"]) for row in rows).values()
    least, most = min(done), max(done)
    seeds = f"{most} seeds" if least == most else f"the {least} to {most} seeds that are done of {len(SEEDS)}"
    power = int(FIRST_SCALE).bit_length() - 1
    yield MEASURED.format(steps=STEPS, workers=WORKERS, seeds=seeds, power=power)
    heads = ["method", *(f"`{name}`" for name in PRECISIONS)]
    for title, name, digits in (("Test loss", "test_loss", 3), ("Training loss", "train_loss", 3)):
        yield from ("", f"### {title}", "")
        yield from table(heads, (_losses(rows, method, name, digits) for method in METHODS))
    yield from ("", "### Bytes on the wire, kB a step and worker", "", "In the second half of the steps.", "")
    yield from table(heads, (_means(rows, method, "wire_kb", 1) for method in METHODS))
    yield from ("", READ)
    yield from ("", "### Skipped steps", "", "Of all, mean over seeds, by the shared loss scale.", "")
    scaled = [name for name, precision in PRECISIONS.items() if precision.scaled]
    yield from table(
        ["method", *(f"`{name}`" for name in scaled)],
        (_means(rows, method, "skipped", 1, scaled) for method in METHODS),
    )


def _of(rows: Rows, precision: str, method: str) -> dict[int, Mapping[str, Any]]:
    """The runs of a cell by seed."""
    return {row["seed"]: row for row in rows if (row["precision"], row["method"]) == (precision, method)}


def _losses(rows: Rows, method: str, name: str, digits: int) -> list[str]:
    """A method's row: the mean of each precision, and its difference from float32."""
    cells, plain = [f"`{method}`"], _of(rows, "fp32", method)
    for precision in PRECISIONS:
        found = _of(rows, precision, method)
        if not found:
            cells.append(MISSING)
            continue
        mean = statistics.fmean(row[name] for row in found.values())
        apart = [row[name] - plain[seed][name] for seed, row in found.items() if seed in plain]
        told = "" if precision == "fp32" else f" ({_apart(apart, digits)})"
        cells.append(f"{mean:.{digits}f}{told}")
    return cells


def _apart(values: Sequence[float], digits: int) -> str:
    """A mean difference with its sign, and its standard error over seeds."""
    if not values:
        return MISSING
    mean = f"{statistics.fmean(values):+.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}"


def _means(
    rows: Rows, method: str, name: str, digits: int, precisions: Sequence[str] = tuple(PRECISIONS)
) -> list[str]:
    cells = [f"`{method}`"]
    for precision in precisions:
        found = _of(rows, precision, method).values()
        cells.append(f"{statistics.fmean(row[name] for row in found):.{digits}f}" if found else MISSING)
    return cells
