"""docs/block_admm.md and its pictures: blocks side by side, from block_admm/results.jsonl."""

from __future__ import annotations

import base64
import statistics
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.block_admm.__main__ import ADAM, BAR, BATCH, PASSES, RANK, RUNS, SEEDS, SGD, VARIANTS, WIDTH
from benchmarks.block_admm.weak import LABELLED
from benchmarks.common.tables import table
from laconic.tools.report.side_by_side import words
from laconic.tools.report.time_line import time_line

TIME, PARTS = "block_admm_time.svg", "block_admm_parts.svg"
SIDE, SCALE, COLUMNS, GAP = 28, 3, 8, 8  # pixels of an image, and how large it is shown
NAMES = {
    "sgd": "back-propagation, SGD",
    "adam": "back-propagation, Adam",
    "blocks": "blocks",
    "blocks, stored": "blocks, mode 'batch'",
    "blocks, 8 bits": "blocks, 8 bits between them",
    "signs, adam": "signs, back-propagation",
    "signs, blocks": "signs, blocks",
    "deep_facto": f"blocks, DeepFacto of rank {RANK}",
}
WEAK = {"weak, adam": "back-propagation, Adam", "weak, deep_facto": f"blocks, DeepFacto of rank {RANK}"}
HEAD = """# Blocks side by side

`laconic.admm` cuts a model into blocks, one on each rank, that train **at the same time**: each solves its
own sub-problem on its own mini-batch, and no backward pass crosses a block. So blocks need not wait for each
other's passes, and a module between two blocks needs no gradient: a step function, a constraint, a
non-negative factorisation.

```python
trainer = laconic.admm.BlockTrainer(model, "block_admm(blocks=3)", example=x)  # on each of 3 ranks
for x, y in loader:  # the same batches on every rank
    loss = trainer.step(x, y)  # the last block's; None elsewhere
trainer.finish()  # mini-batches still in flight
trainer.gather()  # the whole model, on every rank
```

With `torchrun --nproc_per_node 3`, or in the terminal: `laconic train mnist --with "block_admm(blocks=3)"
--workers 3`, whose report has the time line, the bytes of each boundary and both residuals.

**A reconstruction** of stochastic Block-ADMM and DeepFacto (Khorram et al. 2021, arXiv:2105.00339): only the
abstract was available. With blocks f_n, their outputs X_n and scaled duals U_n, both per sample:

```text
L = loss(f_N(X_{N-1}), y) + sum over n < N of beta/2 |X_n - f_n(X_{n-1}) + U_n|^2
```

| step | where | needs |
|---|---|---|
| X_n, U_n are a forward pass and 0, or the stored values | block n + 1 | f_n from block n |
| T_n, parameters: `steps` steps of an optimiser on the own term | block n | X_n + U_n from block n + 1 |
| X_n: `steps` proximal steps on the two terms that contain it | block n + 1 | nothing more |
| U_n += dual (X_n - f_n), at the sample's next visit | block n + 1 | f_n at that visit |

A mini-batch passes through the blocks twice, forward as activations and back as targets X + U; meanwhile
blocks work on other mini-batches. With `steps=1, rate=1` in mode 'online', a single mini-batch is exactly
one step of back-propagation; with several in flight, targets are as many steps old as there are later blocks.

- **Cutting**: an `nn.Sequential`, between its children. By default blocks have equally many layers with
  parameters; `cut=('3', '7')` names the children that begin the second block and those after.
- **Mode 'online'** forgets X and U after each mini-batch: duals are always 0. **Mode 'batch'** stores both by
  sample id, in RAM or, with `folder=`, in a file for each boundary: give `samples=len(dataset)`, and
  `trainer.step(x, y, samples=ids)` with ids of [`laconic.data.with_ids`](api.md).
  `keep=cast('fp16')` halves the storage.
- **Constraints**: `laconic.admm.Proximal(operator)` begins a block, and restricts the previous block's output
  to a set or by a penalty: `Proximal(torch.sign)`, `Proximal(lambda x: x.clamp(0, 1))`. It is never
  differentiated. A step function needs a smaller `beta`, such as 0.03, so that targets can cross the step.
- **DeepFacto**: `laconic.admm.DeepFacto(features=256, rank=32)` begins a block: X = S M with S, M >= 0, by
  multiplicative updates. `facto.code(x)` is each sample's code S, `facto.parts` is M, and `facto.error(x)`
  the reconstruction error.
- **Codecs**: `activations=` and `targets=` take any, such as `minmax(bits=8)`.
- **Adam**: targets are scaled differently from a loss. Momentum SGD at a rate for the loss diverges; pass a
  different optimiser by `optimizer=`, and start with a low rate.
- **Residuals**: `trainer.stats()` has the primal |X - f| / |f| and the dual one, how far X moved since its
  last visit. Test with the plain forward pass of the whole model: that is where a gap between X and f shows.
- **Resuming**: save `trainer.state_dict()` on each rank, between steps; it includes mini-batches in flight.
- **Failures**: a block that diverges raises an error, and the others raise `PeerError` in their next ticks.
- Random layers such as dropout draw new values in each pass; batch norms count a batch twice. Each block's
  rank holds the whole model and trains its own part.
"""
ABOUT = f"""## Measured

MNIST, 784-{WIDTH}-{WIDTH}-10, three blocks in three processes over gloo, {PASSES} passes of batches of
{BATCH}; the same batches for all rows of a seed. Peak rates are {ADAM:g} for Adam, also in blocks, and
{SGD:g} for SGD with Nesterov momentum 0.9. Wrong answers on the test set by a plain forward pass, in %, mean
over seeds with the standard deviation; kB: all blocks' messages, a step; seconds of processors, over all
processes. `python -m benchmarks.block_admm` starts the missing runs: {{found}} of {{planned}} are done.
"""


def page() -> str:
    """The whole page."""
    return written(RUNS.rows())


def written(runs: list[dict[str, Any]]) -> str:
    """The page of these runs."""
    lines = [HEAD]
    if runs:
        lines += [ABOUT.format(found=len(runs), planned=len(SEEDS) * len(VARIANTS)), *_rows(runs), ""]
        lines += [*_claims(runs), "", *_time(runs), *_residuals(runs), *_facto(runs)]
        lines += _weak(runs)
    return "\n".join(lines).rstrip("\n") + "\n"


def pictures(docs: Path) -> dict[Path, Callable[[], str]]:
    """The pictures that the runs allow."""
    found: dict[Path, Callable[[], str]] = {}
    if _named(RUNS.rows(), "time line"):
        found[docs / TIME] = lambda: time_line(_named(RUNS.rows(), "time line")[0]["spans"]) + "\n"
    if _named(RUNS.rows(), "deep_facto"):
        found[docs / PARTS] = lambda: mosaic(_named(RUNS.rows(), "deep_facto")[0]["parts"])
    return found


def _named(runs: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [run for run in runs if run["name"] == name]


def _rows(runs: list[dict[str, Any]]) -> list[str]:
    rows = []
    for name, shown in NAMES.items():
        its = _named(runs, name)
        if its:
            spec = f"`{its[0]['spec']}`" if its[0]["spec"] else "-"
            sent = f"{statistics.mean(run['sent_kb'] for run in its):.0f}" if "sent_kb" in its[0] else "-"
            cpu = f"{statistics.mean(run['cpu_s'] for run in its):.0f}"
            rows.append([shown, spec, _errors(its), sent, cpu, str(len(its))])
    return table(("training", "spec", "wrong, %", "kB", "seconds", "seeds"), rows)


def _errors(runs: list[dict[str, Any]]) -> str:
    return _spread([run["error"] for run in runs])


def _spread(values: list[float]) -> str:
    mean = f"{statistics.mean(values):.2f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.2f}"


def _claims(runs: list[dict[str, Any]]) -> Iterator[str]:
    """What was aimed at, and what came out."""
    blocks = [run["error"] for run in _named(runs, "blocks")]
    if blocks:
        missed = "" if max(blocks) < BAR else ", which is missed"
        yield f"- Three blocks were to stay below {BAR:g} %: {max(blocks):.2f} % at most{missed}."
    plain, ours = _named(runs, "signs, adam"), _named(runs, "signs, blocks")
    if plain and ours:
        still = max(run["moved"] for run in plain)
        yield (
            f"- With signs, back-propagation moves the first layer's weights by {still:g}, as a step has the"
            f" gradient 0, and trains the last layer alone: {_errors(plain)} %. Blocks move them by"
            f" {statistics.mean(run['moved'] for run in ours):.1f}, to {_errors(ours)} %."
        )


def _time(runs: list[dict[str, Any]]) -> Iterator[str]:
    lines = _named(runs, "time line")
    if not lines:
        return
    shares = [statistics.mean(column) for column in zip(*(run["overlap"] for run in lines), strict=True)]
    cores, batch = lines[0]["machine"]["cores"], lines[0]["batch"]
    yield "### When each block works\n"
    yield f"![ten steps of three blocks]({TIME})\n"
    yield (
        f"Ten steps of a larger net, 784-1024-1024-1024-10, at batch {batch}, on {cores}"
        f" cores. {words(shares)} A backward pass through the whole model keeps one at work at a time. Times"
        " are of a clock on the wall, so with fewer cores than blocks a bar includes waiting for a core.\n"
    )
    if small := _named(runs, "blocks"):
        share = statistics.mean(run["overlap"][1] for run in small)
        yield (
            f"With the small net above, whose steps take milliseconds, two or more do in {100 * share:.0f} %:"
            " the rest goes by in messages.\n"
        )


def _residuals(runs: list[dict[str, Any]]) -> Iterator[str]:
    rows = []
    for name in ("blocks", "blocks, stored", "signs, blocks", "deep_facto"):
        for boundary in ("1 to 2", "2 to 3"):
            its = [run["residuals"][boundary] for run in _named(runs, name)]
            if its:
                ends = [
                    f"{statistics.mean(each[kind][at] for each in its):.3f}"
                    for kind in ("primal", "dual")
                    for at in (0, -1)
                ]
                rows.append([NAMES[name], boundary, *ends])
    if rows:
        yield "### Residuals\n"
        yield "Means over the first and the last twentieth of the steps; the same two in mode 'online'.\n"
        yield from table(("training", "blocks", "primal, first", "last", "dual, first", "last"), rows)
        yield ""


def _facto(runs: list[dict[str, Any]]) -> Iterator[str]:
    its = _named(runs, "deep_facto")
    if not its:
        return
    lost = _spread([100 * run["reconstruction"] for run in its])
    least = min(min(run["least_part"], run["least_code"]) for run in its)
    zeros = statistics.mean(100 * run["code_zeros"] for run in its)
    yield f"### DeepFacto's parts\n\n![each part's mean image]({PARTS})\n"
    yield (
        f"For each of the {RANK} parts between blocks 1 and 2, the mean of the test images weighted by the"
        f" part's entry in their codes, seed {its[0]['seed']}. The factors lose {lost} % of the first block's"
        f" output (relative norm of the difference); their least entry is {least:.2g}."
        f" Of the codes' entries {zeros:.0f} % are below a hundredth of their mean.\n"
    )


def _weak(runs: list[dict[str, Any]]) -> Iterator[str]:
    rows = []
    for name, shown in WEAK.items():
        its = _named(runs, name)
        for when, after in (("untrained", " before training"), ("trained", "")):
            if its and when in its[0]:
                digits = [_spread([run[when][what] for run in its]) for what in ("code", "hidden")]
                rows.append([shown + after, "-" if after else _errors(its), *digits, str(len(its))])
    if rows:
        yield "### Weak labels\n"
        yield (
            "The net learns only whether a digit is odd. Then a linear readout, fitted to"
            f" {LABELLED:,} images with their digits, has to find the digits from the {RANK} numbers of"
            f" DeepFacto's code, or from the {WIDTH} outputs of the first layer. The net without DeepFacto"
            " has one fitted to these outputs afterwards. The abstract names a weakly supervised setting"
            " and no more; this one is ours. Why the outputs of blocks tell less was not examined.\n"
        )
        yield from table(
            ("training", "wrong parity, %", "wrong digits, code, %", "wrong digits, outputs, %", "seeds"),
            rows,
        )
        yield ""


def mosaic(parts: list[str]) -> str:
    """Images of SIDE x SIDE bytes in hexadecimal digits, side by side as one SVG."""
    rows, step = -(-len(parts) // COLUMNS), SIDE * SCALE + GAP
    drawn = [
        f'<image x="{number % COLUMNS * step}" y="{number // COLUMNS * step}" width="{SIDE * SCALE}"'
        f' height="{SIDE * SCALE}" style="image-rendering:pixelated"'
        f' href="data:image/png;base64,{base64.b64encode(png(bytes.fromhex(part))).decode()}"/>'
        for number, part in enumerate(parts)
    ]
    size = f"{COLUMNS * step - GAP} {rows * step - GAP}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img">'
        "<title>The mean image of each part</title>\n" + "\n".join(drawn) + "\n</svg>\n"
    )


def png(pixels: bytes) -> bytes:
    """SIDE x SIDE grey pixels as a PNG file."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    lines = b"".join(b"\0" + pixels[at : at + SIDE] for at in range(0, SIDE * SIDE, SIDE))
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(lines, 9))
        + chunk(b"IEND", b"")
    )
