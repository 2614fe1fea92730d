"""Parts of the benchmark: how long each may take, and which may run at the same time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One part, a module of this package with a function `run(job)`.

    Args:
        seconds: Deadline, after which its processes are ended.
        group: Parts of one group run at the same time; groups run in ascending order. A part that times
            kernels is alone in its group.
        shards: Number of processes that share the part's work.
        threads: Threads of torch in each process.
    """

    name: str
    seconds: float
    group: int
    shards: int = 1
    threads: int = 1


FIRST = (  # correctness, bandwidth and steps: the first call
    Part("machine", 60, group=0),
    Part("codecs", 140, group=1, shards=5),
    Part("bits", 150, group=1, shards=5),
    Part("api", 130, group=1),
    Part("ranks", 130, group=1, shards=2),
    Part("bandwidth", 90, group=2, threads=4),
    Part("step", 110, group=3, threads=4),
)
SECOND = (  # the second call
    Part("laws", 95, group=4),
    Part("training", 210, group=5, threads=8),
)
PARTS = {part.name: part for part in (*FIRST, *SECOND)}
CALLS = {"1": FIRST, "2": SECOND}


def chosen(only: str | None, call: str) -> list[Part]:
    """Return the parts that `--only` names, separated by commas, or all parts of a call.

    >>> [part.name for part in chosen("step,machine", "1")]
    ['machine', 'step']
    """
    if only is None:
        return list(CALLS[call])
    names = only.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise ValueError(f"--only must name parts among {', '.join(PARTS)}, got {', '.join(unknown)}")
    return [part for part in PARTS.values() if part.name in names]


def groups(parts: list[Part]) -> list[list[Part]]:
    """Return the parts by group, in the order in which groups run."""
    numbers = sorted({part.group for part in parts})
    return [[part for part in parts if part.group == number] for number in numbers]
