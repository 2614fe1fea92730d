"""Which method for which situation: the advice of docs/choosing.md, with the measured figures.

The words are here; figures come from `measured.json`, the trainings and the scaling run.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

from benchmarks.accuracy.contenders import MODELS, SETS
from benchmarks.accuracy.standings import Standing, standings
from benchmarks.common.results import read
from benchmarks.common.tables import spread, table
from benchmarks.own_rates.families import LOCAL_MOMENTUM, WITH_MOMENTUM
from benchmarks.own_rates.page import points_lost
from benchmarks.scaling.__main__ import FEW as FEWEST
from benchmarks.scaling.__main__ import MANY as MOST
from benchmarks.scaling.page import by_method, growth
from benchmarks.through_servers import page as through_servers
from laconic.strategies.distribute import strategy_or_method
from laconic.tools.cli.entries import FEW, MANY, Measured, figures
from laconic.tools.cli.methods import times

TASKS = {"cifar10": "CIFAR-10", "shakespeare": "Shakespeare"}
HEADS = (
    *("spec", "bits sent among N", f"smaller, {FEW}", f"smaller, {MANY}"),
    *(f"lost, {TASKS[task]}" for task in MODELS),
    "lost, own rate",
    *(f"smaller, {TASKS[task]}" for task in MODELS),
    f"growth, {FEWEST} to {MOST}",
)


@dataclass(frozen=True)
class Pick:
    """A spec for a situation, and the reason for it."""

    text: str
    why: str

    @property
    def spec(self) -> str:
        """The method as it prints itself."""
        return repr(strategy_or_method(self.text))


@dataclass(frozen=True)
class Situation:
    """A situation, what matters in it, and what to try first."""

    title: str
    words: str
    picks: tuple[Pick, ...]


SITUATIONS = (
    Situation(
        "A link that you do not know",
        "Rented machines, shared networks, links that change: let `auto()` try a few methods on the link.",
        (
            Pick(
                "auto()",
                "the least compression that the link allows, by measurement, repeated when the link changes",
            ),
        ),
    ),
    Situation(
        "A fast link",
        "NVLink, or 100 Gbit/s between machines. A dense step is short already, and time spent encoding is"
        " time lost: stay with plain DistributedDataParallel, or halve the bytes.",
        (
            Pick("dense()", "exact, and the baseline of everything else"),
            Pick("bf16()", "half the bytes for almost no work, with the range of float32"),
            Pick("fp16()", "the same with three more bits of precision, scaled to fit the largest gradient"),
        ),
    ),
    Situation(
        "1 Gbit/s Ethernet",
        "The step waits for the network, but not for long: send a few bits per entry, without error feedback."
        " On CPUs that share a machine, encoding costs more than it saves at this speed"
        " ([time to accuracy](time_to_accuracy.md))."
        " These methods work with every optimiser, including momentum, and with its usual settings.",
        (
            Pick(
                "cgx()",
                "4 bits both ways; its traffic grows with the number of workers only as an all-reduce does",
            ),
            Pick(
                "qsgd()",
                "4 bits, unbiased, to each other rank: for few workers, from 16 on more than dense",
            ),
            Pick("natural()", "9 bits: rounded to powers of two, with no scale to compute; for few workers"),
            Pick("terngrad()", "2 bits, with much noise: needs a tolerant model"),
        ),
    ),
    Situation(
        "100 Mbit/s and less",
        "Only bytes count: send the largest entries, or signs, and the rest in later steps. At"
        " density d an entry waits for about 1 / d steps: this costs accuracy in short trainings, and less"
        " in longer ones ([DGC over twice the steps](accuracy.md)). Waiting acts like momentum,"
        " so `stc`, `sketchml`, `sign` and `dgc` apply SGD's momentum before the exchange; the first two also"
        " add a part of the later momentum at once to entries that wait ([best rates](own_rates.md)).",
        (
            Pick("stc(density=0.01)", "positions, signs and one magnitude"),
            Pick("sketchml()", "quantises values to bins of equal count"),
            Pick("sign()", "one bit per entry, with error feedback"),
            Pick(
                "dgc(density=0.01, warmup_steps=100)", "the paper's rule: clears the momentum of sent entries"
            ),
            Pick("demo()", "the strongest frequencies of the momentum: the fewest bytes here"),
        ),
    ),
    Situation(
        "Many workers",
        "The traffic of `gather` grows with the number of workers, so a sparse method that is best with"
        " four workers can be worst with sixty-four. The traffic of these grows like an all-reduce. With"
        f" `down=` that of `dgc` and `stc` grows from 4 workers to 64 {through_servers.promise()}, whose"
        " messages are mostly headers ([figures](scaling.md#through-servers-down)). A server gets N - 1"
        " messages per round;"
        " `scatter_reduce(sparse(topk(0.01)), pattern='tree', feedback='both')` sends the same bytes in"
        " log2 N rounds of one message, and unsent entries wait on the inner ranks of the trees.",
        (
            Pick(
                "deft(density=0.01)",
                "each worker selects in some of the layers, so selection gets faster with more workers",
            ),
            Pick("micro(density=0.01)", "each worker selects by a threshold in its own part"),
            Pick("oktopk(density=0.01)", "the largest entries of the whole group, wherever they are"),
            Pick("cgx()", "all entries, in 4 bits: the most faithful of these"),
            Pick("powersgd()", "two thin matrices of rank 4 per tensor, by all-reduce"),
        ),
    ),
    Situation(
        "Adam",
        "Adam divides by the size of recent gradients, and error feedback distorts that size. 1-bit Adam"
        " learns it from dense gradients, freezes it, and then sends momentum. Methods without feedback"
        " (`cgx()`, `qsgd()`) hold nothing back.",
        (
            Pick(
                "onebit_adam(warmup_steps=200)",
                "with plain `torch.optim.Adam` or `AdamW`; dense until the warm-up ends",
            ),
            Pick(
                "zero_one_adam(freeze_steps=200, double_every=200)",
                "even fewer rounds; replicas differ between them",
            ),
            Pick(
                "sparse_adam(warmup_steps=400)",
                "the signs of a tenth of the entries, chosen by how far they move the weights",
            ),
            Pick("comp_ams()", "AMSGrad with any codec or selector"),
            Pick("cgx()", "works with any optimiser"),
        ),
    ),
    Situation(
        "Muon",
        "Muon updates matrices by orthonormalised momentum, usually with AdamW for embeddings, heads and"
        " vectors: pass both optimisers as a list. Newton-Schulz iterations are the same on all ranks, so any"
        " exchange of gradients works; Dion2 exchanges and orthonormalises only some of the rows.",
        (
            Pick("cgx()", "works with any optimiser"),
            Pick(
                "dion2()",
                "a quarter of the rows or columns, which costs accuracy in short trainings; Muon with"
                " `nesterov=False`",
            ),
        ),
    ),
    Situation(
        "Sharded models (FSDP2)",
        "Under `fully_shard` a rank needs only its shard of the mean gradient, so the method must scatter"
        " before it gathers: CGX, whose first half is the reduce-scatter, or `scatter_reduce` of a codec that"
        " sends every entry. Plain error feedback goes with either. [Sharded models](sharded.md) has"
        " examples, parameters in few bits, and the methods between machines on a mesh of two dimensions.",
        (
            Pick("cgx(bits=8)", "a quarter of the bytes"),
            Pick("cgx()", "4 bits"),
        ),
    ),
    Situation(
        "Long local phases",
        "Between regions, over the internet, or with clients that seldom connect: each worker takes many"
        " local steps, then sends one update, which can be compressed too, with `compressor=`.",
        (
            Pick(
                "diloco(every=50)",
                "an outer momentum over many local steps; any inner optimiser",
            ),
            Pick(
                "sparseloco(every=10, density=0.05)",
                "a twentieth of the movements, in 2 bits: the fewest bytes here",
            ),
            Pick("local_sgd(every=8)", "the simplest"),
            Pick("slowmo()", "slow momentum, applied when workers synchronise"),
            Pick("lpdt()", "8-bit differences to neighbours, and momentum that copes with skewed shards"),
        ),
    ),
    Situation(
        "Stragglers and faults",
        "A barrier waits for the slowest worker. Gossip waits for at most one neighbour, and with"
        " `patience_s=` the others continue without a lost worker: see [faults and guarantees](faults.md).",
        (
            Pick("sgp()", "one peer per step: a slow rank delays few others"),
            Pick("osgp()", "the same, but uses messages some steps late, so no step waits for one"),
            Pick("adpsgd()", "no worker waits for another"),
            Pick(
                "lsgd(count='total')",
                "workers run at their own speed and follow the one with the lowest loss",
            ),
        ),
    ),
    Situation(
        "Machines of several devices",
        "Links are fast inside a machine and slow between machines: send gradients inside, compress between.",
        (
            Pick(
                "two_level(sum(), gather(sparse(topk(density=0.01), indices=golomb())))",
                "a dense mean inside each machine, the largest entries between machines",
            ),
            Pick("by_machine(sgp(), ranks_per_node=8)", "the same for a strategy: machines gossip"),
        ),
    ),
    Situation(
        "Tensors that differ",
        "Embeddings, norms and small tensors can use another method. Vectors stay dense anyway.",
        (
            Pick(
                "by_name({'*embed*': qsgd(levels=127)}, rest=topk(density=0.01))",
                "by name pattern",
            ),
            Pick("by_size(10000, large=topk(density=0.01))", "by size"),
        ),
    ),
)


def anchor(title: str) -> str:
    """The anchor of a heading on the site and on GitHub.

    >>> anchor("Sharded models (FSDP2)"), anchor("100 Mbit/s and less")
    ('sharded-models-fsdp2', '100-mbits-and-less')
    """
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())


def choices() -> str:
    """All situations, each with the figures of its picks: a block of docs/choosing.md."""
    lines: list[str] = []
    for situation in SITUATIONS:
        lines += [f"## {situation.title}", "", situation.words, ""]
        lines += [f"- `{pick.spec}`: {pick.why}" for pick in situation.picks]
        lines.append("")
        if rows := [row for pick in situation.picks if any(row := _figures(pick.spec))]:
            used = [i for i in range(len(HEADS)) if any(row[i] for row in rows)]
            lines += [*table([HEADS[i] for i in used], [[row[i] for i in used] for row in rows]), ""]
    return "\n".join(lines).rstrip()


def _figures(spec: str) -> tuple[str, ...]:
    """Bits on the stored gradient; points lost and bytes in the trainings; growth of bytes. () if none."""
    measured = figures().get(spec)
    trained = [_trained().get((spec, task)) for task in MODELS]
    cells = (
        *(sent_cells(measured) if measured else ("", "", "")),
        *(_lost(each) for each in trained),
        _at_own_rates().get(spec, ""),
        *(times(each.smaller) if each else "" for each in trained),
        _growth().get(spec, ""),
    )
    return (f"`{spec}`", *cells) if any(cells) else ()


def sent_cells(measured: Measured) -> tuple[str, ...]:
    """Bits that a worker sends, by formula; and how many times less than dense among FEW and MANY.

    Bold: what grows with every worker added, and what is more than dense.
    """
    smaller = [measured.smaller(size) for size in (FEW, MANY)]
    formula = str(measured.growth)
    return (
        f"**{formula}**" if measured.growth.grows else formula,
        *(times(each) if each > 0.995 else f"**{times(each)}**" for each in smaller),
    )


def _lost(standing: Standing | None) -> str:
    """Points of accuracy lost, if there is a dense training to compare with."""
    if standing is None or standing.contender.spec == standing.contender.against:
        return ""
    return "" if math.isnan(standing.lost.mean) else standing.lost.text()


@lru_cache(maxsize=1)
def _trained() -> dict[tuple[str, str], Standing]:
    """Trainings on unskewed shards, by spec and task."""
    return {
        (standing.contender.spec, task): standing
        for contenders in reversed(SETS.values())  # if it is in several sets, the one with four workers wins
        for task in MODELS
        for standing in standings(task, contenders)
        if standing.contender.skew is None
    }


@lru_cache(maxsize=1)
def _at_own_rates() -> dict[str, str]:
    """Points lost by the small net, each method at its own learning rate, by spec."""
    families = (WITH_MOMENTUM, LOCAL_MOMENTUM)  # of two figures, the one after more steps
    found = {spec: points_lost(spec, family) for family in families for spec in family.others}
    return {repr(strategy_or_method(spec)): spread(lost) for spec, lost in found.items() if lost}


@lru_cache(maxsize=1)
def _growth() -> dict[str, str]:
    """Bytes that a worker sends among 64 relative to 4: as measured at 64, else by the formula."""
    found = {rows[0]["spec"]: growth(rows) for rows in by_method(read("scaling")["traffic"])}
    formulas = {spec: each.growth.at(MOST) / each.growth.at(FEWEST) for spec, each in figures().items()}
    counted = {repr(strategy_or_method(spec)): grown for spec, grown in found.items() if grown is not None}
    return {spec: f"{grown:.2f}" for spec, grown in (formulas | counted).items()}
