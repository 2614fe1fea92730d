"""docs/low_bit.md: signs and few bits, from the results of lowbit and xnor."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from benchmarks.common.tables import table
from benchmarks.lowbit.__main__ import BATCH, LR, RUNS
from benchmarks.xnor import __main__ as xnor

HEAD = """# Signs and few bits

`laconic.lowbit` trains models whose layers compute with the signs of their weights and inputs, or with a
few bits of them, and packs them for inference: one bit per weight, and products by XNOR and popcount. `make
docs` writes this page.

```python
import torch
from torch import nn

import laconic

first, last = [nn.Linear(784, 1024), nn.BatchNorm1d(1024)], [nn.BatchNorm1d(1024), nn.Linear(1024, 10)]
net = nn.Sequential(*first, nn.Linear(1024, 1024), *last)
handle = laconic.lowbit.binarise(net)  # the first and the last layer stay real
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
loss = nn.functional.cross_entropy(net(torch.randn(100, 784)), torch.randint(0, 10, (100,)))
loss.backward()
optimizer.step()  # and the weights of the middle layer are clipped to [-1, 1]
flips = handle.flips()  # share of its signs that changed

packed = laconic.lowbit.pack(net)
assert packed[2].bits.nbytes * 32 == net[2].weight.nbytes
x = torch.randn(3, 784)
assert torch.equal(packed(x), net.eval()(x))  # the same bits
```

On the command line: `laconic train mnist --model bnn --lowbit "binarise()" --with "dgc(density=0.01)"`.

## Training

| | forward | backward |
|---|---|---|
| weight w | sign(w), sign(0) = 1 | the gradient where abs(w) <= 1; each step clips w to [-1, 1] |
| input x | sign(x) | the gradient where abs(x) <= 1 |
| `quantise(weights=k)` | 2^k even levels from -1 to 1; `scale="log"`: powers of two | the same |
| `quantise(gradients=6)` | - | powers of two, rounded at random so that the mean is kept |

- Linear, Conv2d, LSTM, GRU, LSTMCell and GRUCell are converted in place. The parameters are the same
  objects under the same names: optimisers, DistributedDataParallel, `laconic.compress` and `state_dict` work
  as before.
- **LSTM and GRU** equal their cells at each step: the weights, the inputs and the states h have few bits, the
  gates and c are float32. All arguments of torch's layers work, packed sequences included, except projections
  (`proj_size`), which are refused.
- **Clipping works with every optimiser**: one hook of the process clips after each step, on copies of the
  model too. `handle.remove()` ends the clipping, and restores the plain layers with their master weights.
- Only **float32** models are accepted, under autocast or not. Weights that are masked, or penalised by
  `admm`, are refused: a layer has one transform; use `keep=` to separate them.
- Inside `nn.TransformerEncoder` torch's fast path for evaluation, which reads weights and calls no layer, is
  off until `handle.remove()`.
- **Inputs need both signs**: put a BatchNorm before a converted layer, and no ReLU between them.
- `stochastic=True` draws the signs of inputs in training; random bits depend on a seed and a count of
  calls, which `handle.state_dict()` saves. Give each rank its own `seed=`. A call that activation
  checkpointing repeats has the same bits and does not count, among a layer's last 512.
- `norm="shift"` and `laconic.optim.ShiftAdaMax` replace factors by powers of two, as in the paper.
- Training computes in float32, and saves neither time nor memory. LSTM and GRU loop over time in Python, and
  take several times as long as torch's.

Ours, not the papers': the evenly spaced levels from -1 to 1 (one bit is then the sign, and padding stays
exact), the ends and the zero of the gradients' levels, and ShiftAdaMax's stored maximum, which the authors'
code rounds in place so that it can never fall.

## Packing

`pack(net)` copies the model. Weights take `weights` bits each, rows padded to whole bytes; biases,
BatchNorms and real layers stay float32. Results are bit-identical to the model in evaluation, because
products of levels are whole numbers that float32 represents exactly, and all other operations have the same
order. So a BatchNorm and a sign are not folded into a threshold: that is exact only up to the rounding of
the BatchNorm. Inputs of several bits are sums of signs, and take one product for each bit. Padding with
zeros is exact. A layer whose products could exceed 2^24, and logarithmic levels, are refused.

`save_packed(packed, path)` writes only tensors, numbers and names. `load_packed(path, model)` takes the
plain model, reads with `weights_only=True`, validates everything, and does not change `model`. It also reads
the `packed.pt` that `laconic train --lowbit "binarise()"` writes to its folder.
"""


PRODUCTS = ("product", "kernel", "ms", "GOP/s", "faster than float32", "than int8", "aimed at")


RECURRENT = """## Accuracy of a recurrent net

Shakespeare, letter by letter (`python -m benchmarks.lowbit shakespeare`): {steps} steps at batch {batch},
Adam at a peak rate that is better than its double and its half with the first seed. The LSTM, 128 wide, has
few bits in weights, inputs and states; the embedding and the last layer are float32. Bits per letter of the
test text, the fewer the better: mean and standard deviation over seeds. *Time*: processor time, as a multiple
of float32's on the same machine.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_speed(), *_accuracy(), *_recurrent()]) + "\n"


def _speed() -> Iterator[str]:
    found = xnor.RUNS.get("avx512")
    assert found is not None
    yield "## Speed"
    yield ""
    yield (
        f"One thread of a shared machine ({found['machine']['processor']}), medians over {found['rounds']}"
        " rounds of `python -m benchmarks.xnor`, packing of inputs included. torch's products are measured in"
        " the same rounds: float32 by `torch.mm` or `conv2d`, and int8 by `torch._int_mm`, of inputs that are"
        " int8 already. `src/laconic/kernels/xnor/README.md` explains how the kernels work."
    )
    yield ""
    yield _aims(found["rows"], "float32", "int8")
    yield ""
    yield from table(PRODUCTS, map(_product, found["rows"]))
    yield ""
    narrower = xnor.RUNS.get("avx2")
    if narrower is not None:
        rows = narrower["rows"]
        yield (
            "The same on a machine where AVX2 is the widest there is, and where torch has no fast int8"
            f" product, as it has above. {_aims(rows, 'float32')}"
        )
        yield ""
        yield from table(PRODUCTS, map(_product, rows))
        yield ""


def _aims(rows: list[dict[str, Any]], *others: str) -> str:
    """Return which aims beside these products of torch are met, and which are missed."""
    met, missed = [], []
    for row in rows:
        factors = (row["times_float32"], "float32"), (row["times_int8"], "int8")
        for (factor, other), bar in zip(factors, row["bars"] or (), strict=False):
            if other not in others:
                continue
            said = f"{factor:.2f} times as fast as {other} for {row['kernel']}, where {bar:g} was aimed at"
            (met if factor >= bar else missed).append(said)
    return " ".join(
        f"Aims that are {name}: {'; '.join(said)}."
        for name, said in (("met", met), ("missed", missed))
        if said
    )


def _product(row: dict[str, Any]) -> list[str]:
    bars = " and ".join(f"{bar:g}" for bar in row["bars"]) if row["bars"] else ""
    int8 = "-" if row["times_int8"] is None else f"{row['times_int8']:.2f} x"
    speed = [f"{row['ms']:.3f}", f"{row['gop_s']:,}", f"{row['times_float32']:.2f} x", int8, bars]
    return [row["what"], row["kernel"], *speed]


def _accuracy() -> Iterator[str]:
    rows = RUNS.rows()
    if not rows:
        return
    yield "## Accuracy"
    yield ""
    yield (
        "Test error of `python -m benchmarks.lowbit`, mean and standard deviation over seeds: an MLP of 3 x"
        " 1024 on MNIST, four convolutions and two dense layers on CIFAR-10, Adam with a rate that falls"
        f" exponentially from {LR:g}, batches of {BATCH}, the same for all rows."
        " The first and the last layer stay float32: of MNIST's packed model the first layer,"
        f" 784 x 1024, is {4 * 784 * 1024 / 1e6:.2f} MB."
    )
    yield ""
    heads = ["task", "bits", "epochs", "error, %", "of the packed", "same bits", "MB", "packed, MB", "seeds"]
    yield from table(heads, _trained(rows))


def _trained(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    def key(row: dict[str, Any]) -> tuple[str, str]:
        return row["task"], row["method"]

    for (task, method), group in groupby(sorted(rows, key=key), key):
        each = list(group)
        error = _spread([100 * row["error"] for row in each])
        ends = ["-"] * 4
        if "packed_error" in each[0]:
            packed = _spread([100 * row["packed_error"] for row in each])
            same = "yes" if all(row["same_bits"] for row in each) else "no"
            ends = [packed, same, f"{each[0]['bytes'] / 1e6:.2f}", f"{each[0]['packed_bytes'] / 1e6:.2f}"]
        yield [task, f"`{method}`", str(each[0]["epochs"]), error, *ends, str(len(each))]


def _recurrent() -> Iterator[str]:
    found = RUNS.rows("shakespeare")
    if not found:
        return
    yield ""
    yield RECURRENT.format(**{key: found[0][key] for key in ("steps", "batch")})
    rows = []
    floats = [row for row in found if row["method"] == "float"]
    plain = statistics.mean(row["cpu_s"] for row in floats)
    for method, group in groupby(sorted(found, key=lambda row: row["method"]), lambda row: row["method"]):
        each = list(group)
        bits = _spread([row["bits_per_letter"] for row in each])
        same = "yes" if all(row.get("same_bits") for row in each) else "-"
        comparable = len({row["machine"]["processor"] for row in (*floats, *each)}) == 1
        times = f"{statistics.mean(row['cpu_s'] for row in each) / plain:.1f}" if comparable else "-"
        rows.append([f"`{method}`", f"{each[0]['lr']:g}", bits, same, times, str(len(each))])
    yield from table(("bits", "peak rate", "bits per letter", "same bits packed", "time", "seeds"), rows)


def _spread(values: list[float]) -> str:
    mean = f"{statistics.mean(values):.2f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.2f}"
