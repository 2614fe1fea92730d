"""docs/rigl.md: accuracy, bytes, size and speed of sparse training, from benchmarks/rigl/results.jsonl."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.common.tables import table
from benchmarks.rigl.__main__ import RUNS

HEAD = """# Sparse training, measured

`make docs` writes this page from the results of `python -m benchmarks.rigl`.
[Sparse training](sparse_training.md) explains the names and their use.
"""
ACCURACY = """## Accuracy

CIFAR-10, a ResNet of three blocks with {weights:,} weights, {steps:,} steps at batch {batch}, SGD
with Nesterov momentum 0.9 and a peak rate of {lr:g} for all, the same batches for all; layers by ERK, masks
updated every {every} steps until three quarters of the training. Mean over seeds and standard deviation, in %
of the test set, and points below the dense net.
"""
AGAIN = """The same with {n} times as many {what}: {weights:,} weights, {steps:,} steps
(`python -m benchmarks.rigl --{option} {n}`).
"""
OPTIONS = {"width": "channels", "times": "steps"}  # of what there are as many more
TRAFFIC = """## Bytes

ResNet-20 at density 0.1 by `rigl(density=0.1, every=100)`, {workers} processes over gloo, {steps} steps.
*Gradients*: bytes on the wire with headers, as a share of DDP's own dense sum; *payload*: each message
counted once, without headers; *scores*: the dense gradients that are summed at mask updates, as a share of
the dense gradients of all steps; *together*: gradients and scores.
"""
FORWARD = """## Export

Least of many forward passes on one thread, in milliseconds of processor time, and bytes of all parameters and
buffers, of the dense model and of its `export(model, "csr")`. A sparse convolution writes its patches to
memory, a dense one does not.
"""
RECURRENT = """## A recurrent net

Shakespeare, letter by letter: an embedding, an LSTM of 128 and a linear layer, all of them masked;
{steps:,} steps at batch {batch}, Adam at a peak rate of {lr:g}, the best of four for each training. Bits per
letter of the test text, the fewer the better; *in the model*: share of all parameters in use; *FLOPs*: share
of the dense net's, by `handle.flops(x)` (`python -m benchmarks.rigl letters`).
"""
FLOPS = """## FLOPs

Operations of ResNet-50 with RigL, updated every 100 of 32,000 steps, as a share of the dense net's
{dense:.2f} billion per image and forward pass: 2 for each entry in use and position of an output.
*Published*: those of a training in the README of google-research/rigl (`python -m benchmarks.rigl flops`).
"""
PUBLISHED = {("erk", 0.2): "0.42", ("uniform", 0.2): "0.23", ("erk", 0.1): "0.24", ("uniform", 0.1): "0.13"}
SPECS = ("rigl", "sparse_evolution", "static_masks", "gradual_pruning")
WEIGHTS = 74_800  # of the net's convolutions and its linear layer
WITHIN, SHARE = 2, 0.11  # aims: points below dense at density 0.2, and share of the gradients' bytes at 0.1


def page() -> str:
    """The whole page, of the results that are there."""
    return (
        "\n".join([HEAD, *_accuracy(), *_recurrent(), *_flops(), *_traffic(), *_forward()]).rstrip("\n")
        + "\n"
    )


def runs(group: str = "") -> list[dict[str, Any]]:
    """All trainings of a width or length, the usual ones by default."""
    return [row for row in RUNS.rows(group) if "seed" in row]


def _accuracy() -> Iterator[str]:
    found = runs()
    dense = [run for run in found if run["spec"] == "dense"]
    if not dense:
        return
    first = dense[0]
    yield ACCURACY.format(weights=WEIGHTS, every=50, **{key: first[key] for key in ("steps", "batch", "lr")})
    yield from _table(found)
    yield ""
    yield from _aims(found)
    for option in OPTIONS:
        for group in RUNS.groups():
            if group.startswith(option):
                yield from _again(group, option)


def _again(group: str, option: str) -> Iterator[str]:
    """The table and the aims of another width or length."""
    found = runs(group)
    dense = [run for run in found if run["spec"] == "dense"]
    if dense:
        n, sizes = group.removeprefix(option), {key: dense[0][key] for key in ("weights", "steps")}
        yield AGAIN.format(n=n, option=option, what=OPTIONS[option], **sizes)
        yield from _table(found)
        yield ""
        yield from _aims(found)


def _table(found: list[dict[str, Any]]) -> Iterator[str]:
    """A row for each training: accuracy, and points below the dense one of the same seeds."""
    dense = [run for run in found if run["spec"] == "dense"]
    rows = []
    for spec in sorted({run["spec"] for run in found}, key=_order):
        mine = {run["seed"]: 100 * run["accuracy"] for run in found if run["spec"] == spec}
        lost = [100 * run["accuracy"] - mine[run["seed"]] for run in dense if run["seed"] in mine]
        density = next(run["density"] for run in found if run["spec"] == spec)
        below = "-" if spec == "dense" or not lost else f"{statistics.mean(lost):.2f}"
        rows.append([f"`{spec}`", f"{density:.2f}", _spread([*mine.values()]), below, str(len(mine))])
    yield from table(("training", "density", "accuracy, %", "points below dense", "seeds"), rows)


def _aims(found: list[dict[str, Any]]) -> Iterator[str]:
    """Whether the aims for accuracy are kept."""

    def of(spec: str) -> list[float]:
        return [100 * run["accuracy"] for run in found if run["spec"] == spec]

    dense = of("dense")
    for density in ("0.2", "0.1"):
        ours, static = of(f"rigl(density={density}, every=50)"), of(f"static_masks(density={density})")
        if ours and static:
            more = statistics.mean(ours) - statistics.mean(static)
            kept = "kept" if more > 0 else "missed"
            if kept == "kept" and more < max(map(_deviation, (ours, static))):
                kept += ", by less than the deviation over seeds"
            yield f"- Aim: RigL above static masks at density {density}. {more:+.2f} points: {kept}."
        if ours and density == "0.2":
            less = statistics.mean(dense) - statistics.mean(ours)
            kept = "kept" if less <= WITHIN else "missed"
            yield f"- Aim: RigL within {WITHIN} points of dense at density 0.2. {less:.2f} points: {kept}."
    yield ""


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _order(spec: str) -> tuple[float, int]:
    if spec == "dense":
        return (-1.0, 0)
    density = float(spec.partition("density=")[2].split(",")[0].rstrip(")"))
    return (-density, SPECS.index(spec.partition("(")[0])) if density < 1 else (0.0, 0)


def _spread(values: list[float]) -> str:
    mean = f"{statistics.mean(values):.2f}"
    return mean if len(values) < 2 else f"{mean} ± {_deviation(values):.2f}"


def _recurrent() -> Iterator[str]:
    found = RUNS.rows("letters")
    if not found:
        return
    yield RECURRENT.format(**{key: found[0][key] for key in ("steps", "batch", "lr")})
    rows = []
    for spec in sorted({run["spec"] for run in found}, key=_order):
        mine = [run for run in found if run["spec"] == spec]
        shares = [
            f"{mine[0].get(key, 1.0):.2f}"
            for key in ("density", "model_density", "forward_share", "training_share")
        ]
        rows.append([f"`{spec}`", *shares, _spread([run["bits_per_letter"] for run in mine]), str(len(mine))])
    heads = ("training", "density", "in the model", "FLOPs, forward", "FLOPs, training", "bits per letter")
    yield from table((*heads, "seeds"), rows)
    yield ""


def _flops() -> Iterator[str]:
    found = RUNS.get("flops")
    if found is None:
        return
    yield FLOPS.format(dense=found["rows"][0]["dense_forward"] / 1e9)
    rows = [
        [
            f"`{row['layout']}`",
            f"{row['density']:g}",
            f"{row['forward_share']:.3f}",
            f"{row['training_share']:.3f}",
            PUBLISHED[row["layout"], row["density"]],
        ]
        for row in found["rows"]
    ]
    yield from table(("layout", "density", "forward", "training", "published"), rows)
    yield ""


def _traffic() -> Iterator[str]:
    found = RUNS.get("traffic")
    if found is None:
        return
    yield TRAFFIC.format(**found)
    rows = [
        [
            f"`{row['spec']}`",
            *(f"{row[key]:.4f}" for key in ("gradients", "payload", "scores")),
            f"{row['gradients'] + row['scores']:.4f}",
        ]
        for row in found["rows"]
    ]
    yield from table(("method", "gradients", "payload", "scores", "together"), rows)
    yield ""
    plain = next(row for row in found["rows"] if row["spec"] == "masked(dense())")
    kept = "kept" if plain["gradients"] <= SHARE else "missed"
    yield (
        f"- Aim: `masked(dense())` sends at most {SHARE} of the gradients' bytes. {plain['gradients']:.4f}:"
        f" {kept}; with the scores {plain['gradients'] + plain['scores']:.4f}."
    )
    yield ""


def _forward() -> Iterator[str]:
    found = RUNS.get("forward")
    if found is None:
        return
    yield FORWARD
    yield f"Measured on {found['machine']['processor']}, torch {found['machine']['torch']}.\n"
    rows = [
        [
            row["what"],
            f"{row['density']:g}",
            f"{row['dense_bytes'] / 1e3:.0f}",
            f"{row['csr_bytes'] / 1e3:.0f}",
            f"{row['dense_bytes'] / row['csr_bytes']:.2f}",
            f"{row['dense_ms']:.3f}",
            f"{row['csr_ms']:.3f}",
            f"{row['dense_ms'] / row['csr_ms']:.2f}",
        ]
        for row in found["rows"]
    ]
    heads = ("model", "density", "dense, kB", "CSR, kB", "smaller", "dense, ms", "CSR, ms", "faster")
    yield from table(heads, rows)
