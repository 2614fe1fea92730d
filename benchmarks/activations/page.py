"""docs/activations.md: how to keep less for backward, from benchmarks/activations/results.jsonl."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from benchmarks.activations import accuracy as activations_accuracy
from benchmarks.common.results import read
from benchmarks.common.tables import table

EPOCH = {"resnet20": "ResNet-20", "vgg": "the VGG-like net"}  # trained for an epoch
HEAD = """# Less memory for activations

`make docs` writes this page from the results of `python -m benchmarks.activations`.

Backward needs the inputs of layers, and these take most of the memory of a training. `laconic.activations`
stores them compressed, within an error bound derived from the gradients (COMET); values that must be exact
stay exact:

```python
with laconic.activations.compress(model, "comet(share=0.01)", optimizer):
    for x, y in loader:
        loss = loss_function(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
```

The error affects only the gradients of weights. Its standard deviation there is meant to be `share` of the
mean |momentum|, also when the gradients of several calls or micro-batches add up. This is a target, not a
limit: a bound is computed from the statistics of one step and stays until the next refresh, while gradients
and momentum change. [The error and its target](#the-error-and-its-target) shows the result, also for
`mode='paper'`, the paper's law without the size of the feature map. Features with the same value in
many examples have correlated errors, which can exceed the target in every step: use a smaller `share`
there. The gradient of each layer's input is bit-identical to dense training, with one exception: inputs of
batch norms are compressed too, which changes their input's gradient by about `share` of the gradient of their
output, on average over channels, and by more in a channel whose gradient follows its input.
`comet(norms='exact')` leaves them uncompressed. `blocks(bits=4)` uses the same number of bits for every
layer. Masks of ReLU and dropout take one bit per element and indices of max pooling a few bits, without
error. All other tensors are unchanged.

The block may contain the whole training, a step or a forward pass: bounds adapt in each case, and backward
may run after the block. A session's state has its bounds and its next rounding: save it with the states of
the model and the optimiser. The state of a different model is refused:

```python
session = laconic.activations.compress(model, "comet(share=0.01)", optimizer)
...
torch.save({"model": model.state_dict(), "session": session.state_dict()}, path)
...
session.load_state_dict(torch.load(path)["session"])
```

- **Gradient checkpointing**: `torch.utils.checkpoint` inside the block works; a region stores only its exact
  input, and all other layers are compressed.
- **Autocast** works; with a GradScaler, omit `optimizer`.
- **Compiled code**: a compiled graph saves fused tensors, so a compiled model is refused, and so is a layer
  of the model that runs in a compiled function, and a block that is opened in one. A compiled loss or
  optimiser step works. Graphs of `torch.jit` and `torch.export` are invisible: their saved tensors are
  unchanged.
- **Attention**: `nn.MultiheadAttention` does not call its linear layers as modules, so its saved tensors are
  unchanged. In an `nn.TransformerEncoderLayer` only the feed-forward part is compressed.
- **Computed weights** (parametrised, or gathered by FSDP2) are not recognised; their layers' inputs are
  unchanged.
- **Number formats**: inputs in float32, bfloat16 and float16 are compressed. A float64 model is refused; in a
  mixed one, its float64 layers are unchanged.
- A block that saves tensors but compresses no layer's input **warns**. NaN and Inf in a layer's input raise
  an error that names the layer.
- `laconic.activations.measure(model, batch)` returns saved bytes by layer: `kept.table()`, `kept.picture()`.
  Call it outside of your own block; with a session, it uses the current bounds.
- On a GPU the reference in plain torch runs, which is slow."""


def page() -> str:
    """The whole page."""
    lines, runs = [HEAD], activations_accuracy.RUNS
    for part, write in (("memory", _memory), ("kept", _kept), ("accuracy", _accuracy), ("codec", _codec)):
        found = {"rows": runs.rows(part)} if part == "accuracy" else runs.get(part)
        if found and found["rows"]:
            lines += ["", *write(found["rows"], found.get("machine", {}))]
    lines += ["", *_bound(read("activation_bound"))]
    lines += ["", *_sz3(read("sz3"))]
    return "\n".join([*lines, ""])


def _memory(rows: list[dict[str, Any]], about: dict[str, Any]) -> Iterator[str]:
    yield from ("## Memory and time", "")
    yield "Batches of 256 images of CIFAR-10, each row a fresh process with one thread, after four steps."
    yield "*Kept*: bytes that autograd holds at the end of forward. *Peak*: the most resident memory in the"
    yield "last step, above that before the first step. Seconds of processor time per step, on a shared"
    yield f"machine ({about['processor']})."
    yield ""
    heads = ("net", "activations", "kept, MB", "smaller", "peak, MB", "less", "step, s", "time")
    cells = []
    rows = sorted(rows, key=lambda row: str(row["net"]))
    for net, group in groupby(rows, key=lambda row: row["net"]):
        each = list(group)
        dense = next(row for row in each if row["variant"] == "dense")
        for row in each:
            kept = "kept" in row
            cells.append(
                [
                    net,
                    f"`{row['variant']}`",
                    f"{row['kept'] / 1e6:.1f}" if kept else "-",
                    f"{row['dense'] / row['kept']:.1f}" if kept else "-",
                    f"{row['above'] / 1e6:.0f}",
                    f"{dense['above'] / row['above']:.1f}",
                    f"{row['step_s']:.2f}",
                    f"{row['step_s'] / dense['step_s']:.2f}",
                ]
            )
    yield from table(heads, cells)
    yield ""
    yield "The peak falls less than the kept bytes: a layer's tensors are dense while it works. Freed memory"
    yield "returns to the system here (`MALLOC_MMAP_THRESHOLD_=262144`, in all rows): by default, glibc keeps"
    yield "freed blocks of this size, and the peak of resident memory hides the gain."
    yield "Bytes kept by each layer of ResNet-20, dense (pale) and compressed by `comet()`:"
    yield ""
    yield "![Bytes kept by each layer](activations.svg)"


def _kept(rows: list[dict[str, Any]], about: dict[str, Any]) -> Iterator[str]:
    yield "The bound follows momentum, which grows in the first steps. Kept bytes of a batch of 256 later:"
    yield ""
    heads = ("net", "activations", "after steps", "dense, MB", "kept, MB", "smaller")
    yield from table(
        heads,
        (
            [
                row["net"],
                f"`{row['variant']}`",
                str(row["steps"]),
                f"{row['dense'] / 1e6:.1f}",
                f"{row['kept'] / 1e6:.1f}",
                f"{row['dense'] / row['kept']:.1f}",
            ]
            for row in rows
        ),
    )


def _accuracy(rows: list[dict[str, Any]], about: dict[str, Any]) -> Iterator[str]:
    yield from ("## Accuracy", "")
    yield "Test accuracy in percent after short trainings that differ only in the saved activations:"
    yield "variants of a seed begin with the same weights and see the same batches."
    if long := [name for net, name in EPOCH.items() if any(row["net"] == net for row in rows)]:
        yield f"For {' and '.join(long)} these are 1,600 steps of 32 images, one epoch."
    rates = sorted({f"{plan.lr:g}" for plan in activations_accuracy.PLANS.values()})
    yield f"SGD with momentum 0.9, at {' or '.join(rates)} by net, falling to 0 as a cosine. The nets"
    yield "are not trained to convergence: compare dense with compressed. Mean over"
    yield "seeds and standard deviation; *points*: difference to dense training of the same seeds."
    if any(row["variant"] == activations_accuracy.NUDGED for row in rows):
        yield "*nudged* is dense training whose first weights differ by a millionth: it shows the differences"
        yield "caused by rounding alone."
    yield ""
    key = ("net", "steps", "batch", "variant")
    rows = sorted(rows, key=lambda row: (row["net"], row["steps"], row["variant"] != "dense", row["variant"]))
    dense = {_run(row): row["accuracy"] for row in rows if row["variant"] == "dense"}
    cells = []
    for (net, steps, batch, variant), group in groupby(rows, key=lambda row: [row[each] for each in key]):
        each = list(group)
        pairs = [100 * (row["accuracy"] - dense[_run(row)]) for row in each if _run(row) in dense]
        points = "-" if variant == "dense" or not pairs else _spread(pairs, sign="+")
        ratio = statistics.mean(row["ratio"] for row in each)
        told = [_spread([100 * row["accuracy"] for row in each]), points, f"{ratio:.1f}", str(len(each))]
        cells.append([net, f"{steps} of {batch}", f"`{variant}`", *told])
    yield from table(
        ("net", "steps", "activations", "accuracy, %", "points", "kept, smaller", "seeds"), cells
    )


def _bound(found: dict[str, Any]) -> Iterator[str]:
    yield from ("## The error and its target", "")
    yield "Standard deviation of the error of a layer's weight gradient, over `share` of the mean |momentum|:"
    yield f"{found['net']}, CIFAR-10, SGD with momentum 0.9 at {found['lr']:g}, batches of {found['batch']},"
    yield f"each layer in steps {', '.join(map(str, found['steps']))}, which lie between two refreshes;"
    yield f"`share={found['share']:g}`, `norms='exact'`, from `python -m benchmarks.activation_bound`."
    yield ""
    rows = [(f"`{row['mode']}`", row["ratios"]) for row in found["rows"]]
    yield from table(
        ("mode", "least", "median", "most"),
        [
            (mode, *(f"{each:.2f}" for each in (min(ratios), statistics.median(ratios), max(ratios))))
            for mode, ratios in rows
        ],
    )


def _run(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["net"], row["steps"], row["batch"], row["seed"]


def _spread(values: list[float], sign: str = "") -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.2f}{spread}"


def _codec(rows: list[dict[str, Any]], about: dict[str, Any]) -> Iterator[str]:
    yield from ("## The codec", "")
    yield "Inputs of convolutions and batch norms of a ResNet-20 after 30 steps. The bound is a multiple of"
    yield f"the rms. One thread of a shared machine, {about['kernels']}; blosc2 where it is installed."
    yield ""
    heads = ("input", "zeros", "bound", "codec", "smaller", "encode, GB/s", "decode, GB/s")
    yield from table(
        heads,
        (
            [
                row["input"],
                f"{100 * row['zeros']:.0f} %",
                f"{row['bound']:g}",
                row["codec"],
                f"{row['ratio']:.2f}",
                f"{row['encode_gb_s']:.2f}" if "encode_gb_s" in row else "-",
                f"{row['decode_gb_s']:.2f}" if "decode_gb_s" in row else "-",
            ]
            for row in rows
        ),
    )


def _sz3(found: dict[str, Any]) -> Iterator[str]:
    yield from ("## Comparison with SZ3", "")
    yield f"Same inputs and bounds, pysz {found['pysz']}, in one process, from `python -m benchmarks.sz3`."
    yield "*Zeros kept*: the share of zeros that stay zeros. *Time*: SZ3's processor time, without"
    yield "prediction, over that of `error_bound`."
    yield ""
    kept = "zeros kept"
    heads = ("input", "bound", "error_bound", kept, "SZ3, no prediction", kept, "SZ3's default", kept)
    yield from table(
        (*heads, "time to encode", "to decode"),
        [
            [
                row["input"],
                f"{row['bound']:g}",
                f"{row['ours']:.2f}",
                _share(row["zeros_kept"]),
                f"{row['sz3']:.2f}",
                _share(row["sz3_zeros_kept"]),
                f"{row['sz3_predicting']:.2f}",
                _share(row["sz3_predicting_zeros_kept"]),
                f"{row['encode_times']:.1f}",
                f"{row['decode_times']:.1f}",
            ]
            for row in found["rows"]
        ],
    )


def _share(x: float | None) -> str:
    return "-" if x is None else f"{x:.0%}"
