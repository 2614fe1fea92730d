"""Which method for which situation: the advice of docs/choosing.md, and what was measured of each.

Words are here; figures come from `measured.json`, the trainings and the scaling run.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import lru_cache

from benchmarks.contenders import MODELS, SETS
from benchmarks.scaling import RESULT
from benchmarks.standings import Standing, standings

from docs.scaling_page import FEW, MANY, by_method, growth
from docs.tables import table
from laconic.cli.entries import figures
from laconic.cli.methods import times
from laconic.strategies.distribute import strategy_or_method

TASKS = {"cifar10": "CIFAR-10", "shakespeare": "Shakespeare"}
HEADS = (
    *("spec", "bits"),
    *(f"lost, {TASKS[task]}" for task in MODELS),
    *(f"smaller, {TASKS[task]}" for task in MODELS),
    f"growth, {FEW} to {MANY}",
)


@dataclass(frozen=True)
class Pick:
    """A spec for a situation, and why: words that follow its spec."""

    text: str
    why: str

    @property
    def spec(self) -> str:
        """The method as it prints itself."""
        return repr(strategy_or_method(self.text))


@dataclass(frozen=True)
class Situation:
    """Where somebody stands, what to think of there, and what to try first."""

    title: str
    words: str
    picks: tuple[Pick, ...]


SITUATIONS = (
    Situation(
        "A link that you do not know",
        "Rented machines, shared networks, links that change: have a few of them tried on the spot.",
        (
            Pick(
                "auto()", "the least compression that the link allows, measured bucket by bucket, tried anew"
            ),
        ),
    ),
    Situation(
        "A fast link",
        "NVLink, or 100 Gbit/s between machines. A dense step is short already, and time spent encoding is"
        " time lost: stay with plain DistributedDataParallel, or halve the bytes.",
        (
            Pick("dense()", "exact, and what all else is held against"),
            Pick("bf16()", "half the bytes for almost no work; nothing overflows that float32 holds"),
            Pick("fp16()", "the same with three more bits of precision and a narrower range"),
        ),
    ),
    Situation(
        "1 Gbit/s Ethernet",
        "The step waits for the wire, but not for long: a few bits an entry, without any memory of what was"
        " lost. They go with every optimiser, momentum included, and their settings can stay as they are.",
        (
            Pick("cgx()", "4 bits both ways; its traffic grows with the workers only as an all-reduce does"),
            Pick("qsgd()", "4 bits, unbiased; gathered, so for few workers"),
            Pick("natural()", "9 bits: rounded to powers of two, with no scale to compute"),
            Pick("terngrad()", "2 bits, and so much noise that it needs a tolerant model"),
        ),
    ),
    Situation(
        "100 Mbit/s and less",
        "The wire is all that counts: send the largest entries, or signs, and keep the rest for later. Give"
        " an entry time: at density d it waits for about 1 / d steps, which short trainings pay for, and"
        " longer ones less ([DGC over twice the steps](accuracy.md)).",
        (
            Pick(
                "dgc(density=0.01, warmup_steps=100)", "what waits gathers momentum too; it wants a warm-up"
            ),
            Pick("sign()", "one bit an entry, with feedback"),
            Pick("sketchml()", "values in bins of equal count"),
            Pick("stc(density=0.01)", "positions, signs and one magnitude: the fewest bytes here"),
        ),
    ),
    Situation(
        "Many workers",
        "What `gather` sends grows with the group, so a sparse method that is best among four can be worst"
        " among sixty-four. These change as many entries as were asked for, or move as an all-reduce does.",
        (
            Pick("deft(density=0.01)", "layers are dealt out, so that selecting gets faster with workers"),
            Pick("micro(density=0.01)", "each worker selects in its own part by a threshold"),
            Pick("oktopk(density=0.01)", "the group's largest entries, wherever they are"),
            Pick("cgx()", "all entries, in 4 bits: the most faithful of these"),
            Pick("powersgd()", "two thin matrices a tensor, by all-reduce"),
        ),
    ),
    Situation(
        "Adam",
        "Adam divides by the size of recent gradients, and what waits in a memory spoils that. 1-bit Adam"
        " learns it dense, freezes it, and sends momentum. Codes without memory (`cgx()`, `qsgd()`) hold"
        " nothing back.",
        (
            Pick(
                "onebit_adam(warmup_steps=200)",
                "`torch.optim.Adam` or `AdamW` as it is; dense until the warm-up ends",
            ),
            Pick(
                "zero_one_adam(freeze_steps=200, double_every=200)",
                "fewer rounds still; between them replicas differ",
            ),
            Pick("comp_ams()", "AMSGrad with any codec or selector"),
            Pick("cgx()", "any optimiser takes its mean"),
        ),
    ),
    Situation(
        "Sharded models (FSDP2)",
        "Under `fully_shard` a rank holds a shard of each gradient, so only methods without memory apply: the"
        " first half of CGX is the reduce-scatter.",
        (
            Pick("cgx(bits=8)", "a quarter of the bytes"),
            Pick("cgx()", "4 bits"),
        ),
    ),
    Situation(
        "Long local phases",
        "Between regions, over the internet, or with clients that are seldom together: take many steps alone,"
        " then send one update. What is sent can be compressed as a gradient is, by `update=`.",
        (
            Pick("diloco(every=50)", "an outer momentum over many local steps; any inner optimiser"),
            Pick("local_sgd(every=8)", "the plainest"),
            Pick("slowmo()", "slow momentum at the meetings"),
            Pick(
                "lpdt()", "8-bit differences to neighbours, and momentum that withstands shards that differ"
            ),
        ),
    ),
    Situation(
        "Stragglers and faults",
        "A barrier waits for the slowest. Gossip waits for a neighbour or for nobody, and with `patience_s=`"
        " the living go on without the lost: [faults and guarantees](faults.md) says what survives what.",
        (
            Pick("sgp()", "one peer a step: a slow rank delays few"),
            Pick("osgp()", "the same, some steps behind, so that no step waits for a message under way"),
            Pick("adpsgd()", "nobody waits for anybody"),
            Pick("lsgd(count='total')", "each at its own pace; who has the least loss leads"),
        ),
    ),
    Situation(
        "Machines of several devices",
        "Links inside a machine are fast and between machines slow: gradients inside, a method between.",
        (
            Pick(
                "two_level(sum(), gather(sparse(topk(density=0.01), indices=golomb())))",
                "a mean inside each machine, the largest entries between",
            ),
            Pick("by_machine(sgp(), local=8)", "the same for strategies: machines gossip"),
        ),
    ),
    Situation(
        "Tensors that differ",
        "Embeddings, norms and small tensors may go another way than the rest; vectors stay dense anyway.",
        (
            Pick(
                "by_name({'*embed*': qsgd(levels=127)}, rest=topk(density=0.01))",
                "by patterns of their names",
            ),
            Pick("by_size(10000, large=topk(density=0.01))", "by their size"),
        ),
    ),
)


def anchor(title: str) -> str:
    """Of a heading, as the site and GitHub make it.

    >>> anchor("Sharded models (FSDP2)"), anchor("100 Mbit/s and less")
    ('sharded-models-fsdp2', '100-mbits-and-less')
    """
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())


def choices() -> str:
    """All situations, each with what was measured of its picks: a block of docs/choosing.md."""
    lines: list[str] = []
    for situation in SITUATIONS:
        lines += [f"## {situation.title}", "", situation.words, ""]
        lines += [f"- `{pick.spec}`: {pick.why}" for pick in situation.picks]
        lines.append("")
        if rows := [row for pick in situation.picks if any(row := _figures(pick.spec))]:
            told = [i for i in range(len(HEADS)) if any(row[i] for row in rows)]
            lines += [*table([HEADS[i] for i in told], [[row[i] for i in told] for row in rows]), ""]
    return "\n".join(lines).rstrip()


def _figures(spec: str) -> tuple[str, ...]:
    """Bits on the stored gradient, points lost and bytes in the trainings, traffic's growth: all known."""
    known = figures().get(spec)
    trained = [_trained().get((spec, task)) for task in MODELS]
    cells = (
        f"{known.matrix_bits:.3g}" if known else "",
        *(_lost(each) for each in trained),
        *(times(each.smaller) if each else "" for each in trained),
        _growth().get(spec, ""),
    )
    return (f"`{spec}`", *cells) if any(cells) else ()


def _lost(standing: Standing | None) -> str:
    """Points of accuracy, where there is a dense training to compare with."""
    if standing is None or standing.contender.spec == standing.contender.against:
        return ""
    return "" if math.isnan(standing.lost.mean) else standing.lost.text()


@lru_cache(maxsize=1)
def _trained() -> dict[tuple[str, str], Standing]:
    """By spec and task, of shards that are alike."""
    return {
        (standing.contender.spec, task): standing
        for contenders in reversed(SETS.values())  # what is in several sets is shown among four workers
        for task in MODELS
        for standing in standings(task, contenders)
        if standing.contender.skew is None
    }


@lru_cache(maxsize=1)
def _growth() -> dict[str, str]:
    """How much more a worker sends among MANY than among FEW, by spec."""
    found = {rows[0]["spec"]: growth(rows) for rows in by_method(json.loads(RESULT.read_text())["traffic"])}
    return {
        repr(strategy_or_method(spec)): f"{grown:.2f}" for spec, grown in found.items() if grown is not None
    }
