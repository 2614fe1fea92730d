"""A page for every registered name: its paper, equation, wire and bound, its call, its measured figures.

The site's build makes them from docstrings, the registry and result files; they are not stored.
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

from benchmarks.accuracy.contenders import MODELS, SETS
from benchmarks.accuracy.page import cells as accuracy_cells
from benchmarks.accuracy.standings import Standing, standings
from benchmarks.common.results import read
from benchmarks.common.tables import table
from benchmarks.pages.docstrings import markdown, words
from benchmarks.pages.situations import SITUATIONS, anchor
from benchmarks.scaling.page import by_method, traffic_cells
from laconic.core.spec import find, names, signature_text
from laconic.exchange.method import Paper
from laconic.tools.cli.entries import PIECES, CatalogueEntry, entries, headline
from laconic.tools.cli.methods import HEADS, STATUS, cells

FOLDER = "names"
SECTIONS = {  # of the site's navigation, by the kind of `entries`
    "paper": "Methods",
    "strategy": "Strategies",
    "selector": "Selectors",
    "codec": "Codecs",
    "reducer": "Reducers",
}
KINDS = {
    "Methods": "method: a paper, or a relative of one",
    "Strategies": "strategy: which ranks communicate, and when",
    "Selectors": "selector: which entries of a gradient to send",
    "Codecs": "codec: a gradient to bytes and back",
    "Reducers": "reducer: each rank's gradient to the mean",
    "Index codings": "index coding: how the positions of selected entries are sent",
    "Feedback": "feedback: unsent entries are sent later",
    "Topologies": "topology: the peers of each rank in gossip",
    "Partitions": "partition: the examples of each client",
    "Federated schemes": "federated scheme: messages between clients and a server",
    "Samplings": "sampling: the clients of a round",
    "Activation codings": "activation coding: tensors saved for backward",
    "Pipeline codings": "pipeline coding: tensors sent between stages",
    "Low-bit trainings": "low-bit training: a model whose weights end in a few bits",
    "Sparsifiers": "sparsifier: the weights in use",
    "Sparse computing": "sparse computing: a share of the weights is used, and a share of the inputs saved",
    "Block trainings": "block training: a model whose blocks train in parallel",
    "Deployments": "deployment: location of a script's replicas",
}
CALLS = {
    "strategy": 'model, optimizer = laconic.distribute(model, optimizer, "{spec}")',
    "Index codings": 'handle = laconic.compress(model, optimizer, "sparse(topk(0.01), indices={spec})")',
    "Low-bit trainings": 'laconic train shakespeare --model lstm --with "dense()" --lowbit "{spec}"',
    "Activation codings": 'with laconic.activations.compress(model, "{spec}", optimizer):',
    "Pipeline codings": 'handle = laconic.pipeline.compress(schedule, "{spec}", samples=len(dataset))',
    "Sparsifiers": 'sparse = laconic.sparsity.sparsify(model, optimizer, "{spec}", steps=steps)',
    "Sparse computing": 'laconic train cifar10 --with "cgx()" --sparsity "{spec}"',
    "Block trainings": 'trainer = laconic.admm.BlockTrainer(model, "{spec}", example=x)',
    "Deployments": 'laconic.Replicator("{spec}").launch(main)',
    "Topologies": 'model, optimizer = laconic.distribute(model, optimizer, "sgp(topology={spec})")',
    "Partitions": 'shares = laconic.parse("{spec}").deal(labels, clients=100, seed=0)',
    "Federated schemes": 'laconic federate mnist --with "{spec}"',
    "Samplings": 'laconic federate mnist --with "updates(stc(), sampling={spec})"',
}
CALL = 'handle = laconic.compress(model, optimizer, "{spec}")'
MEASURED_ON = (
    "On the stored gradient of [the list of all names](../methods.md), matrices only: bits per parameter that"
    " a worker puts on the wire in a step, among 4 and among 16; how many times less than a dense all-reduce"
    " among as many that is, below 1 for more; a formula for any number; the mean of |C(x) - x|² / |x|², and"
    " its declared bound."
)
TRAINED = (
    "Equal steps on small models, mean ± standard error over seeds; kB on the wire per worker and step."
    " Baselines, bounds and explanations are under [accuracy](../accuracy.md)."
)
TRAINED_HEADS = ("task", "workers", "spec", "test accuracy, %", "points lost", "sent, kB", "smaller")
GROWN = (
    "Sent per worker and step, by number of workers, and the share of entries that a step"
    " changes; more under [many workers](../scaling.md)."
)
GROWTH = ("growth, 4 to 64", "changed, %")


@dataclass(frozen=True)
class Name:
    """A registered name: its section, and its specs with figures; none if it only stands inside others."""

    name: str
    section: str
    entries: tuple[CatalogueEntry, ...]

    @property
    def make(self) -> Any:
        return find(self.name)

    @property
    def src(self) -> str:
        """The path of its page, from the folder of all pages."""
        return f"{FOLDER}/{self.name}.md"

    @property
    def spec(self) -> str:
        """A call that works."""
        return self.entries[0].spec if self.entries else (*self.make.examples, f"{self.name}()")[0]


@lru_cache(maxsize=1)
def everything() -> tuple[Name, ...]:
    """All registered names by section, in the order of the table of methods."""
    found = [
        Name(name, SECTIONS[kind], tuple(group))
        for (kind, name), group in groupby(entries(), key=lambda entry: (entry.kind, entry.name))
    ]
    makers = {name: find(name) for name in names()}
    found += [
        Name(name, title.partition(":")[0], ())
        for title, kind in PIECES.items()
        for name, make in makers.items()
        if isinstance(make, type) and issubclass(make, kind)
    ]
    return tuple(found)


def page(name: Name) -> str:
    """The whole page."""
    parts = [f"# `{name.name}`", f"*{_linked(_sentence(headline(name.make)), name.name)}*", *_facts(name)]
    parts += [f"```python\n{_call(name)}\n```"]
    about = [text for text in (sys.modules[name.make.__module__].__doc__, _own(name.make)) if text]
    first, _, rest = about[0].strip().partition("\n\n")
    parts += ["## What it does"]
    parts += [
        markdown(text, lambda code: _link(code, name.name)) for text in (rest, *about[1:]) if text.strip()
    ]
    if not rest.strip() and len(about) == 1:
        parts.append(_linked(" ".join(first.split()), name.name))
    parts += ["## Its call", f"```text\n{name.name}{_wrapped(signature_text(name.make))}\n```"]
    for title, found in (
        ("When to use it", _situations(name)),
        ("Measured: bytes and error", _measured(name)),
        ("Measured: accuracy", _trained(name)),
        ("Measured: many workers", _grown(name)),
    ):
        if found:
            parts += [f"## {title}", *found]
    return "\n\n".join(parts) + "\n"


def _own(make: Any) -> str | None:
    """The docstring of the class or function itself, not an inherited one."""
    own = make.__doc__ if not isinstance(make, type) else vars(make).get("__doc__")
    return inspect.cleandoc(own) if own else None


def _sentence(text: str) -> str:
    """The text with a capital and a full stop."""
    return text if text.endswith("...") else f"{text[0].upper()}{text[1:]}."


def _facts(name: Name) -> list[str]:
    """A short list: paper, status, what it sends, what it needs."""
    make = name.make
    status, paper = getattr(make, "status", "own"), getattr(make, "paper", "-")
    facts = [("Kind", KINDS[name.section])]
    if paper != "-":
        facts.append(("Paper", words(paper)))
    code = getattr(make, "code", "-")
    facts.append(("Status", f"*{status}*: {STATUS[status]}{f' ({code})' if code != '-' else ''}"))
    if isinstance(make, Paper):
        facts.append(("Sends", _linked(make.sends, name.name)))
    needs = dict.fromkeys(entry.needs for entry in name.entries if entry.needs)
    if needs:
        facts.append(("Needs", words(" or ".join(needs))))
    known = [entry.unbiased for entry in name.entries if entry.unbiased is not None]
    if known:
        facts.append(("Unbiased", "yes" if all(known) else "no" if not any(known) else "some of its forms"))
    facts.append(("In the terminal", f"`laconic methods {name.name}`"))
    return [
        "<div class='facts' markdown>",
        "\n".join(f"- **{head}**: {value}" for head, value in facts),
        "</div>",
    ]


def _call(name: Name) -> str:
    kind = name.entries[0].kind if name.entries else name.section
    return CALLS.get(kind, CALL).format(spec=name.spec) if name.section != "Feedback" else _fed(name.name)


def _fed(name: str) -> str:
    """The call of a feedback, which a method chooses: it is not an argument of a spec."""
    return f'laconic.parse("{name}()")  # a method brings its own'


def _wrapped(signature: str) -> str:
    """A signature, with one parameter per line if it is long."""
    if len(signature) < 70:
        return signature
    inside = re.split(r", (?![^(\[{]*[)\]}])", signature.removeprefix("(").removesuffix(")"))
    return "(\n" + "".join(f"    {each},\n" for each in inside) + ")"


def _situations(name: Name) -> list[str]:
    lines = [
        f"- **[{situation.title}](../choosing.md#{anchor(situation.title)})**: `{pick.spec}`: {pick.why}"
        for situation in SITUATIONS
        for pick in situation.picks
        if pick.spec.partition("(")[0] == name.name
    ]
    return ["\n".join(lines)] if lines else []


def _measured(name: Name) -> list[str]:
    if all(entry.max_bits is None for entry in name.entries):
        return []
    rows = [[f"`{entry.spec}`", *cells(entry)] for entry in name.entries]
    return [MEASURED_ON, "\n".join(table(["spec", *HEADS], rows))]


def _trained(name: Name) -> list[str]:
    """One row for each of its measured trainings."""
    rows = []
    for task, standing in _standings():
        if standing.contender.spec.partition("(")[0] != name.name:
            continue
        spec, _, accuracy, lost, _, _, sent, smaller = accuracy_cells(standing)
        skew = "" if standing.contender.skew is None else ", skewed shards"
        rows.append(
            [f"{task}{skew}", str(standing.contender.workers), spec, accuracy, lost or "-", sent, smaller]
        )
    return [TRAINED, "\n".join(table(TRAINED_HEADS, rows))] if rows else []


@lru_cache(maxsize=1)
def _standings() -> tuple[tuple[str, Standing], ...]:
    found = {  # sets of eight workers share their dense trainings
        (task, standing.contender.spec, standing.contender.workers, standing.contender.skew): standing
        for task in MODELS
        for contenders in SETS.values()
        for standing in standings(task, contenders)
    }
    return tuple((task, standing) for (task, *_), standing in found.items())


def _grown(name: Name) -> list[str]:
    traffic = read("scaling")["traffic"]
    sizes = sorted({row["workers"] for row in traffic})
    rows = [
        traffic_cells(rows, sizes)
        for rows in by_method(traffic)
        if rows[0]["spec"].partition("(")[0] == name.name
    ]
    return [GROWN, "\n".join(table(("kB, by workers", *map(str, sizes), *GROWTH), rows))] if rows else []


def _linked(text: str, own: str) -> str:
    return words(text, lambda code: _link(code, own))


def _link(code: str, own: str) -> str:
    """A registered name in a text leads to its page."""
    found = re.fullmatch(r"`(\w+)(\(.*\))?`", code)
    if found is None or found[1] == own or found[1] not in {each.name for each in everything()}:
        return code
    return f"[{code}]({found[1]}.md)"
