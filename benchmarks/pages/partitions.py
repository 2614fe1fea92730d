"""What docs/partitions.md shows: each partition's sizes and labels on one made-up set, and three pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import laconic
from benchmarks.common.tables import table
from laconic.data.partition import Deal
from laconic.tools.cli.partition import spread
from laconic.tools.report.partition_picture import picture

EXAMPLES, LABELS, CLIENTS = 60_000, 10, 100
SPECS = (
    "iid()",
    "label_shards()",
    "classes_per_client()",
    "classes_per_client(gamma=0.95)",
    "dirichlet(alpha=0.1)",
    "lda(alpha=0.1)",
    "lda(alpha=1000.0)",
)
PICTURES = {  # file name by spec
    "label_shards()": "partition-shards.svg",
    "classes_per_client(gamma=0.95)": "partition-classes.svg",
    "dirichlet(alpha=0.1)": "partition-dirichlet.svg",
}
HEADS = ("spec", "examples per client", "labels per client", "examples with nobody")


def deal(spec: str) -> Deal:
    """The set, dealt with seed 0: as many examples of each label."""
    partition = laconic.parse(spec)
    made: Deal = partition.over(torch.arange(EXAMPLES) % LABELS, CLIENTS, seed=0)
    return made


def block() -> str:
    """One row per spec."""
    rows = []
    for spec in SPECS:
        made = deal(spec)
        held = made.counts().count_nonzero(1).tolist()
        sizes, labels = (spread(values).replace(" per client", "") for values in (made.sizes, held))
        rows.append([f"`{spec}`", sizes, labels, f"{EXAMPLES - sum(made.sizes):,}"])
    return "\n".join(table(HEADS, rows))


def pictures(docs: Path) -> dict[Path, Callable[[], str]]:
    """What makes each picture, by its path."""

    def drawn(spec: str) -> Callable[[], str]:
        return lambda: picture(deal(spec), f"{LABELS} labels")

    return {docs / name: drawn(spec) for spec, name in PICTURES.items()}
