"""docs/admm.md and docs/admm.svg: models in 1 to 3 bits, from benchmarks/admm/results.jsonl."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.admm.__main__ import (
    BATCH,
    DIVERGED,
    EVERY,
    GAMMA,
    GROWTH,
    RATE,
    ROUNDED,
    RUNS,
    SEEDS,
    SOME,
    START,
    STEPS,
    VARIANTS,
    WIDTH,
    loss_of,
    own_rates,
)
from benchmarks.common.tables import table

HEAD = """# Language models in 1 to 3 bits

`laconic.lowbit.admm` trains a recurrent language model whose matrices end in a small table of values, with a
scale for each row: a ternary LSTM is 15 times smaller than float32, with all scales and biases counted. The
model, the optimiser and the training loop do not change:

```python
import torch

import laconic
from laconic.tools.tasks.shakespeare import LSTM

model = LSTM(200)
optimizer = torch.optim.SGD(model.parameters(), lr=3.0, momentum=0.9, nesterov=True)
handle = laconic.lowbit.admm(model, optimizer, table="ternary", tie="row")
for letters in torch.randint(0, 128, (3, 16, 65)):
    loss = torch.nn.functional.cross_entropy(model(letters[:, :-1]).flatten(0, 1), letters[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

small = handle.pack()
torch.save(small.state_dict(), "small.pt")
again = laconic.lowbit.load_tables(LSTM(200), torch.load("small.pt", weights_only=True))
assert torch.equal(again(letters), handle.finish()(letters))  # bit for bit
assert handle.size().smaller > 15
```

With the weights Theta, their nearest table values G and scaled duals lambda (Xu et al. 2021,
arXiv:2111.14836):

| | |
|---|---|
| each step | gamma (Theta - G + lambda) is added to the gradient |
| every 50 steps | G is the nearest to Theta + lambda, then lambda grows by Theta - G |
| then | gamma grows by 15 % up to `most`, and lambda shrinks by as much |
| nearest | alternates alpha = v.q / (q.q) and the nearest entries to v / alpha, five times, from two starts |

**A reconstruction.** The paper's text was not available: its abstract names the method, the tied tables and
the extra-gradient step; gamma, its schedule and the update interval of G are ours.

- **Tables**: "binary" 1 bit, "ternary" 1.6 bits (five in a byte), "quinary" {0, ±1, ±2} and "septenary" {0,
  ±1, ±2, ±4} 3 bits. **Scales**: one for each "row", each matrix ("layer") or the "model".
- **Layers**: Embedding, LSTM, GRU and Linear; `keep=` names what stays float32. Biases always do.
- **Progress**: `handle.residual()` is |Theta - G| / |Theta|; `with handle.quantised():` evaluates G.
- **SGD, not Adam**: Adam divides the penalty's gradient away, and G is never reached. The penalty
  overshoots where gamma times the learning rate is above 1.
- **Do not let the learning rate end at zero**: G and lambda change until the end, and the weights must be
  able to follow. A twentieth of the peak is enough.
- **Data-parallel**: under DistributedDataParallel and `laconic.compress` the penalty comes after the
  exchange, and all ranks have the same G. Call `admm` before `laconic.compress`. Where a
  method applies momentum before the exchange, the changed gradient gives it back to the optimiser; `dgc` and
  `signum` warn of it. Strategies whose replicas differ are not supported.
- **Extra-gradient**: with `extragradient=True` two calls of `optimizer.step()` are one step: the first
  predicts, the second steps from the same place with the gradient there. Save after an even number of
  calls. It takes a much lower learning rate than plain steps: where rate times curvature is 1, the
  prediction is at the minimum, its gradient is 0, and the weights drift.
- **Resuming**: save `handle.state_dict()` with the states of the model and the optimiser.
- **Time**: a packed layer unpacks its matrix at each call, so it saves memory, not time.
- `laconic.lowbit.straight_through` is the baseline with the same tables, scales and files.
- In the terminal: `laconic train shakespeare --model lstm --with "dense()" --lowbit
  "admm(table='ternary')"` tests G, shows the residual, and writes `packed.pt` next to the checkpoints."""
ABOUT = f"""## Measured

An LSTM of {WIDTH} units on Shakespeare, letter by letter, {STEPS:,} steps of {BATCH} windows of 64 letters,
SGD with Nesterov momentum 0.9; the same batches for all rows of a seed. Each row is at the peak rate with the
lowest test loss of the first seed among those tried, which a table below lists. The penalty is not the
default one: it begins after {START} steps with gamma {GAMMA:g}, which grows {GROWTH:g} times every {EVERY}
steps, as one seed of shorter trainings chose. An extra-gradient step takes two gradients, so its rows have
half as many steps. Loss in nats a letter on the test set, mean over seeds with the standard deviation; "above
float": of the same seeds. *Smaller* counts scales, biases and tables; the file is that of `torch.save`.
`python -m benchmarks.admm` starts the missing runs."""
WIDE, HIGH, LEFT, TOP = 720, 330, 60, 20
COLOURS = {
    "float": "#888888",
    "admm, ternary": "#0b6e4f",
    "straight-through, ternary": "#c8553d",
    "admm, binary": "#5fb49c",
    "straight-through, binary": "#e9a178",
}
Runs = dict[str, dict[int, dict[str, Any]]]


def page() -> str:
    """The whole page."""
    runs = grouped()
    if not runs:
        return f"{HEAD}\n"
    lines = [HEAD, "", ABOUT, ""]
    heads = (
        "weights",
        "peak rate",
        "loss",
        "above float, %",
        "bits a weight",
        "smaller",
        "file, smaller",
        "residual",
        "seeds",
    )
    lines += table(heads, rows(runs))
    lines += [
        "",
        "![Test loss of the quantised weights by step](admm.svg)",
        "",
        *claims(runs),
        "",
        *searches(),
        "",
        *elsewhere(),
    ]
    return "\n".join([*lines, ""])


def grouped(group: str = "") -> Runs:
    """The runs of a length and width, the usual ones by default, at their own rates, by variant and seed."""
    found: Runs = {}
    every = RUNS.rows(group)
    own = own_rates(every)
    for run in every:
        if run["rate"] == own.get(run["variant"]) and DIVERGED not in run:
            found.setdefault(run["variant"], {})[run["seed"]] = run
    return found


def searches() -> Iterator[str]:
    """The section of all rates that were tried."""
    tried: dict[str, dict[float, float]] = {}
    for run in RUNS.rows():
        if run["seed"] == SEEDS[0]:
            tried.setdefault(run["variant"], {})[run["rate"]] = loss_of(run)
    yield "Losses of the first seed by peak rate; a search ends when both neighbours of the best are worse."
    yield "Rows with one rate were not searched, and those whose best rate is the lowest are not finished:"
    yield ""
    rates = sorted({rate for losses in tried.values() for rate in losses})
    heads = ("weights", *(f"{rate:g}" for rate in rates))
    yield from table(
        heads,
        (
            (name, *(f"{tried[name][rate]:.3f}" if rate in tried[name] else "" for rate in rates))
            for name in VARIANTS
            if name in tried
        ),
    )


def rows(runs: Runs) -> Iterator[Sequence[str]]:
    """A row for each variant, then those of plain rounding."""
    base = runs.get("float", {})
    for variant in VARIANTS:
        if variant in runs and variant != "float":
            its = runs[variant]
            one = next(iter(its.values()))
            losses = {seed: run["quantised"] for seed, run in its.items()}
            residual = statistics.mean(run["curve"][-1]["residual"] for run in its.values())
            smaller = f"{one['dense_file'] / one['file']:.1f}"
            size = (f"{one['bits']:.2f}", f"{one['smaller']:.1f}", smaller, f"{residual:.3f}")
            yield (variant, f"{one['rate']:g}", *compared(losses, base), *size, str(len(its)))
        elif variant in runs:
            losses = {seed: run["float"] for seed, run in base.items()}
            rate = f"{next(iter(base.values()))['rate']:g}"
            yield (variant, rate, *compared(losses, base), "32", "1.0", "1.0", "-", str(len(base)))
    for name in ROUNDED if base else ():
        losses = {seed: run["rounded"][name] for seed, run in base.items()}
        yield (
            f"float, rounded afterwards, {name}",
            "",
            *compared(losses, base),
            "-",
            "-",
            "-",
            "-",
            str(len(base)),
        )


def compared(losses: dict[int, float], base: dict[int, dict[str, Any]]) -> tuple[str, str]:
    """The mean loss with its deviation, and percent above float32 over the seeds that both have."""
    spread = f" ± {statistics.stdev(losses.values()):.3f}" if len(losses) > 1 else ""
    above = excess(losses, base)
    return f"{statistics.mean(losses.values()):.3f}{spread}", "-" if above is None else f"{above:.1f}"


def excess(losses: dict[int, float], base: dict[int, dict[str, Any]]) -> float | None:
    """Percent above float32, mean over the seeds that both have."""
    shared = [100 * (loss / base[seed]["float"] - 1) for seed, loss in losses.items() if seed in base]
    return statistics.mean(shared) if shared else None


def claims(runs: Runs) -> Iterator[str]:
    """What was aimed at, and what came out."""
    ours = runs.get("admm, ternary", {})
    if not ours:
        return
    above = excess({seed: run["quantised"] for seed, run in ours.items()}, runs.get("float", {}))
    size = next(iter(ours.values()))["smaller"]
    yield f"- Ternary ADMM is {size:.1f} times smaller, everything counted; the aim was 15."
    if above is not None:
        missed = "" if above <= 3 else ", which is missed"
        yield f"- Its loss is {above:.1f} % above float32's; the aim was 3 %{missed}."
    for name in ("ternary", "binary"):
        yield from against(name, runs.get(f"admm, {name}", {}), runs.get(f"straight-through, {name}", {}))


def against(name: str, ours: dict[int, dict[str, Any]], other: dict[int, dict[str, Any]]) -> Iterator[str]:
    """ADMM beside straight-through training, over the seeds that both have."""
    shared = sorted(ours.keys() & other.keys())
    if shared:
        less = [other[seed]["quantised"] - ours[seed]["quantised"] for seed in shared]
        mean, better = statistics.mean(less), sum(each > 0 for each in less)
        yield (
            f"- {name.capitalize()} ADMM ends {abs(mean):.3f} nats {'below' if mean > 0 else 'above'}"
            f" straight-through training after equal steps, and is better in {better} of {len(shared)} seeds."
        )


def elsewhere() -> Iterator[str]:
    """The section of other lengths and widths, as far as they were run."""
    found = {group: grouped(group) for group in RUNS.groups()}
    if not any(found.values()):
        return
    yield "## Where the gap comes from"
    yield ""
    yield (
        "The same with more steps (`--times`, the penalty's schedule stretched as much) and with more units"
        " (`--width`). Above float: of the same length, width and seeds. The first row has the best rate"
        f" of each; longer and wider trainings all have the rate {RATE:g}, which is too high for"
        " straight-through training: compare their columns with float32, not with each other."
    )
    yield ""
    heads = ("trainings", "float, loss", *(f"{name}, above float, %" for name in SOME[1:]), "seeds")
    everything = {f"{STEPS:,} steps, {WIDTH} units": grouped()}
    everything |= {named(name): runs for name, runs in found.items() if runs}
    yield from table(heads, (gap(name, runs) for name, runs in everything.items()))
    yield ""


def gap(name: str, runs: Runs) -> Sequence[str]:
    """A row of that section: over the seeds that float32 and ADMM both have."""
    seeds = sorted(runs["float"].keys() & runs[SOME[1]].keys())
    base = {seed: runs["float"][seed] for seed in seeds}
    mean = statistics.mean(run["float"] for run in base.values())
    above = (
        excess({seed: run["quantised"] for seed, run in runs.get(each, {}).items()}, base)
        for each in SOME[1:]
    )
    return (name, f"{mean:.3f}", *("-" if each is None else f"{each:.1f}" for each in above), str(len(seeds)))


def named(group: str) -> str:
    """A group of runs in words: times4, width400 or both."""
    sizes = {"times": 1, "width": WIDTH} | {part[:5]: int(part[5:]) for part in group.split("-")}
    return f"{sizes['times'] * STEPS:,} steps, {sizes['width']} units"


def picture() -> str:
    """The curves of test loss at the quantised weights, mean over seeds, as SVG."""
    curves = {name: mean_curve(its) for name, its in grouped().items() if name in COLOURS}
    values = [loss for curve in curves.values() for _, loss in curve if loss < 3]
    low, high = (min(values) - 0.03, min(max(values), 2.6)) if values else (0.0, 1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" role="img" font-size="12"'
        ' font-family="sans-serif" fill="#777">',
        "<title>Test loss of the quantised weights by step</title>",
    ]

    def at(step: float, loss: float) -> str:
        x = LEFT + (WIDE - LEFT - 220) * step / STEPS
        return f"{x:.1f},{TOP + (HIGH - TOP - 40) * (high - min(loss, high)) / (high - low):.1f}"

    for tick in range(6):
        loss = low + (high - low) * tick / 5
        x, y = at(0, loss).split(",")
        parts.append(f'<text x="{float(x) - 8}" y="{y}" text-anchor="end">{loss:.2f}</text>')
        parts.append(f'<path d="M{x},{y}H{WIDE - 220}" stroke="#7774" fill="none"/>')
    for step in range(0, STEPS + 1, STEPS // 3):
        x = at(step, low).split(",")[0]
        parts.append(f'<text x="{x}" y="{HIGH - 20}" text-anchor="middle">{step:,} steps</text>')
    for number, (name, curve) in enumerate(
        sorted(curves.items(), key=lambda each: [*COLOURS].index(each[0]))
    ):
        path, y = " ".join(at(*point) for point in curve), TOP + 14 + 20 * number
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        parts.append(f'<path d="M{WIDE - 205},{y - 4}h18" stroke="{COLOURS[name]}" stroke-width="3"/>')
        parts.append(f'<text x="{WIDE - 180}" y="{y}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def mean_curve(runs: dict[int, dict[str, Any]]) -> list[tuple[int, float]]:
    """Step and loss at G, or in float32 without one, mean over seeds."""
    columns = zip(*(run["curve"] for run in runs.values()), strict=True)
    return [
        (points[0]["step"], statistics.mean(p.get("quantised", p["loss"]) for p in points))
        for points in columns
    ]
