"""docs/claims.md: the headline claims of each system's paper beside our measurements.

The rows are in `claims.txt`. A figure there is a cell of another generated page:
`{page|part of the text before its table|first cells of its row, by ";"|column}`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from benchmarks.common.tables import table

ROWS = Path(__file__).with_name("claims.txt")
VERDICTS = {
    "met": "the claim is about bytes, time or an operator, and holds in our measurement of it",
    "partly": "it holds in a smaller setting than the paper's, or a part of it holds",
    "not met": "it does not hold in our setting, which may be too short or too small",
    "not measurable here": "it needs data, hardware or a baseline that we do not have",
    "not measured": "it could be measured here, and is not yet",
}
SOURCES = ("abstract", "paper", "README", "recalled")
FIGURE = re.compile(r"\{([^{}]+)\}")
NUMBER = re.compile(r"-?[\d,]*\.?\d+")


@dataclass(frozen=True)
class Page:
    """A page or block of `write`, the file that holds it, and the benchmark behind it."""

    command: str
    doc: str = ""
    block: bool = False


PAGES = {  # by the name of the file or block
    "accuracy": Page("benchmarks.accuracy"),
    "activations": Page("benchmarks.activations"),
    "admm": Page("benchmarks.admm"),
    "batch_augmentation": Page("benchmarks.augmentation", "large_batches", block=True),
    "block_admm": Page("benchmarks.block_admm"),
    "federated_accuracy": Page("benchmarks.federated"),
    "large_batches": Page("benchmarks.large_batch", block=True),
    "low_bit": Page("benchmarks.lowbit"),
    "meta_learning": Page("benchmarks.meta"),
    "methods": Page("benchmarks.methods"),
    "own_rates": Page("benchmarks.own_rates"),
    "pipelines_measured": Page("benchmarks.pipeline"),
    "precision": Page("benchmarks.precision"),
    "predictions": Page("benchmarks.predictions", "steps"),
    "replicator": Page("benchmarks.replicator", block=True),
    "rigl": Page("benchmarks.rigl"),
    "scaling": Page("benchmarks.scaling"),
    "sparse_steps": Page("benchmarks.sparse_steps"),
    "steps": Page("benchmarks.steps"),
    "time_to_accuracy": Page("benchmarks.time_to_accuracy"),
    "straggler": Page("benchmarks.straggler"),
    "xnor": Page("benchmarks.xnor", "low_bit"),
    "zerofl": Page("benchmarks.zerofl"),
}


@dataclass(frozen=True)
class Claim:
    """One row. `source`: where the claim was read.

    `verdict` is one of VERDICTS; after "met" follow bounds of the first figure: "met, at least 8".
    """

    group: str
    system: str
    cited: str
    source: str
    claim: str
    paper: str
    here: str
    verdict: str

    @property
    def status(self) -> str:
        """The verdict without bounds."""
        return self.verdict.partition(",")[0]

    @property
    def figures(self) -> list[str]:
        """The figures in braces."""
        return FIGURE.findall(self.here)

    @property
    def pages(self) -> list[str]:
        """The pages with these figures, in order."""
        return list(dict.fromkeys(found.partition("|")[0] for found in self.figures))


HEAD = """\
# Claims of the papers

Each row is a headline claim of the paper behind a name in this library, and what we measured. Below
each name stands where the claims were read: in the paper, its abstract, or its authors' README; *recalled*
ones are general knowledge, and their numbers may be inexact.

Trainings here are small nets on CPUs, and none is trained to convergence: they can contradict a claim about
ImageNet in our setting, but not confirm it. `make docs` writes this page: each figure is a cell of the linked
page, which the command in the row regenerates. Methods with error feedback left momentum to the optimiser in
the rows from [accuracy](accuracy.md): with local momentum, their present default, they lose less."""
HEADS = ("claim", "the paper's setting", "measured here", "verdict", "from")


def page() -> str:
    """The whole page."""
    counts = Counter(claim.status for claim in claims())
    lines = [HEAD, ""]
    lines += table(
        ("verdict", "rows", "meaning"), [(each, str(counts[each]), VERDICTS[each]) for each in VERDICTS]
    )
    for group, rows in groupby(claims(), key=lambda claim: claim.group):
        lines += ["", f"## {group}"]
        for system, its in groupby(rows, key=lambda claim: (claim.system, claim.cited, claim.source)):
            name, cited, source = system
            lines += [
                "",
                f"### {name}",
                "",
                f"{cited}. {read_in(source)}",
                "",
                *table(HEADS, map(cells, its)),
            ]
    return "\n".join(lines) + "\n"


def read_in(source: str) -> str:
    """A sentence on where the claims were read."""
    return "Recalled." if source == "recalled" else f"Read in the {source}."


@lru_cache(maxsize=1)
def claims() -> tuple[Claim, ...]:
    """All rows, in order."""
    return tuple(parsed(ROWS.read_text(encoding="utf-8")))


def parsed(text: str) -> Iterator[Claim]:
    """The rows of a text: "# group", "## system ; paper ; source", then fields that may be indented below."""
    group, system, fields = "", ("", "", ""), dict[str, str]()
    for line in re.sub(r"\n +", " ", text).splitlines():
        if line.startswith("# "):
            group = line.removeprefix("# ")
        elif line.startswith("## "):
            name, cited, source = line.removeprefix("## ").split(" ; ")
            system = name, cited, source
        elif line:
            field, _, value = line.partition(": ")
            fields[field] = value
            if field == "verdict":
                yield Claim(group, *system, **fields)
                fields = {}


def cells(claim: Claim) -> tuple[str, ...]:
    """One row. Raises `ValueError` if it is met, and its first figure is outside its bounds."""
    measured = FIGURE.sub(lambda found: figure(found[1]), claim.here)
    if not within(claim):
        raise ValueError(f"{claim.claim!r} is {claim.verdict!r}, but we measured {measured}: change the row")
    pages = [(PAGES[name].doc or name, PAGES[name].command) for name in claim.pages]
    sources = [f"[{doc}]({doc}.md): `python -m {command}`" for doc, command in pages]
    return claim.claim, claim.paper, measured, claim.status, "; ".join(sources) or "-"


def within(claim: Claim) -> bool:
    """Whether the first figure is within the bounds of the verdict."""
    for bound, limit in re.findall(r"(least|most) ([\d.]+)", claim.verdict):
        value = float(NUMBER.findall(figure(claim.figures[0]))[0].replace(",", ""))
        if value < float(limit) if bound == "least" else value > float(limit):
            return False
    return True


def figure(reference: str) -> str:
    """A cell of a page. Raises `ValueError` if the page has no such cell."""
    name, under, row, column = reference.split("|")
    first = row.split(";")
    for about, (heads, *rows) in tables(name):
        if under in about and column in heads:
            for each in rows:
                if each[: len(first)] == first:
                    return each[heads.index(column)]
    raise ValueError(f"page {name} has no row {row!r} with {column!r} under {under!r}: change the claim")


@lru_cache
def tables(name: str) -> list[tuple[str, list[list[str]]]]:
    """The tables of a page, heads first, each with the text since the last heading."""
    found: list[tuple[str, list[list[str]]]] = []
    about, lines = "", text_of(name).splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("|"):
            if not before.startswith("|"):
                found.append((about, []))
            if not line.startswith("|---"):
                found[-1][1].append([cell.strip() for cell in line.strip("|").split(" | ")])
        else:
            about = line if line.startswith("#") else f"{about} {line}"
    return found


def text_of(name: str) -> str:
    """The text of a page or block, from its results."""
    from benchmarks.pages import write  # which imports this module

    about = PAGES[name]
    if about.block:
        return write.BLOCKS[name]()
    return write.WHOLE[write.ROOT / "docs" / f"{about.doc or name}.md"]()
