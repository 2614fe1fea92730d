"""Catalogue entries of all names for --with: payload, paper and measured figures.

`python -m benchmarks.methods` writes the figures to `measured.json`.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from laconic.activations import Coding
from laconic.admm import BlockAdmm
from laconic.codecs.dense import Dense
from laconic.comm.wire_model import all_reduce_bytes
from laconic.core.codec import Codec
from laconic.core.layout import Layout
from laconic.core.selector import IndexCoding, Selector
from laconic.core.spec import Spec, find, names
from laconic.data.partition import Partition
from laconic.exchange.method import Method, Paper, Route
from laconic.federated.samplings import Sampling
from laconic.federated.schemes import Scheme
from laconic.feedback import Feedback
from laconic.lowbit.training import LowBitTraining
from laconic.methods import catalogue
from laconic.pipeline.coding import PipelineCoding
from laconic.reducers import Reducer
from laconic.reducers.sum import Sum
from laconic.replicator.deployment import Deployment
from laconic.sparsity import Sparsifier
from laconic.sparsity.swat import SwatTraining
from laconic.strategies.distribute import strategy_or_method
from laconic.strategies.gossip.topologies import Topology
from laconic.strategies.strategy import Strategy
from laconic.tools.plan.growth import Growth

FIGURES = "measured.json"
CLOSE = 0.02  # tolerance between formula and counted bytes
GROUPS = (2, 4, 8, 16)  # numbers of workers
FEW, MANY = 4, 16
SHOWN = 2  # specs per name
MATRICES = Layout.of((name, (1000, 1000)) for name in ("first.weight", "middle.weight", "last.weight"))
KINDS = {"paper": Paper, "strategy": Strategy, "selector": Selector, "codec": Codec, "reducer": Reducer}
TITLES = {
    "paper": "Methods",
    "strategy": "Strategies: who talks to whom, and when; they exchange parameters, not gradients",
    "selector": "Selectors: which entries of a gradient to send",
    "codec": "Codecs: a gradient to bytes and back",
    "reducer": "Reducers: each rank's gradient to the mean",
}
PIECES: dict[str, type[Spec]] = {
    "Index codings: how the positions of selected entries are sent": IndexCoding,
    "Feedback: memory of unsent gradients": Feedback,
    "Topologies: who talks to whom in gossip": Topology,
    "Partitions: the examples of each client": Partition,
    "Federated schemes: messages between clients and a server": Scheme,
    "Samplings: the clients of a round": Sampling,
    "Activation codings: tensors saved for backward": Coding,
    "Pipeline codings: tensors sent between stages": PipelineCoding,
    "Low-bit trainings: models whose weights end in a few bits": LowBitTraining,
    "Sparsifiers: the weights in use": Sparsifier,
    "Sparse computing: a share of the weights is used, and a share of the inputs saved": SwatTraining,
    "Block trainings: a model whose blocks train in parallel": BlockAdmm,
    "Deployments: locations of a script's replicas": Deployment,
}


@dataclass(frozen=True)
class Measured:
    """Figures of one spec on the stored gradient, matrices only. Errors are |C(x) - x|^2 / |x|^2.

    Attributes:
        bits: Payload per worker and step, in bits per parameter; each message counts once.
        sent: The same for the busiest worker and each of GROUPS, with every copy, without packet headers.
        error: Mean over keys; None if no single codec causes it.
        bias: Error of the mean over keys; None like `error`.
        bound: Largest error by the declared omegas, or by absolute errors if `absolute`.
    """

    bits: float
    sent: tuple[float, ...]
    error: float | None
    bias: float | None
    bound: float | None
    absolute: bool

    def sent_at(self, size: int) -> float:
        return self.sent[GROUPS.index(size)]

    def smaller(self, size: int) -> float:
        return all_reduce_bytes(32.0, size) / self.sent_at(size)

    @property
    def growth(self) -> Growth:
        return Growth.fit(dict(zip(GROUPS, self.sent, strict=True)), CLOSE)


@dataclass(frozen=True)
class CatalogueEntry:
    """One spec of a registered name. `max_bits`: bound of the payload, in bits per parameter of MATRICES.

    Strategies have no figures.
    """

    name: str
    spec: str
    kind: str
    sends: str
    paper: str
    status: str
    needs: str
    unbiased: bool | None
    max_bits: float | None
    measured: Measured | None


def entries() -> list[CatalogueEntry]:
    found = [_entry(name, make, spec) for name, make in catalogue().items() for spec in examples(name, make)]
    order = list(KINDS)
    return sorted(found, key=lambda entry: (order.index(entry.kind), entry.name))


def pieces() -> dict[str, dict[str, Callable[..., Any]]]:
    """Return the makers of names that `--with` does not take by themselves, by title."""
    makers = {name: find(name) for name in names()}
    return {
        title: {
            name: make for name, make in makers.items() if isinstance(make, type) and issubclass(make, kind)
        }
        for title, kind in PIECES.items()
    }


def examples(name: str, make: Callable[..., Any]) -> list[str]:
    """Return up to SHOWN calls: the bare one if possible, then the class's examples.

    >>> examples("topk", catalogue()["topk"])
    ['topk(density=0.01)', 'topk(density=0.3)']
    """
    parameters = inspect.signature(make).parameters.values()
    bare = all(parameter.default is not inspect.Parameter.empty for parameter in parameters)
    found: list[str] = [repr(strategy_or_method(f"{name}()"))] if bare else []
    for call in getattr(make, "examples", ()):
        if len(found) < SHOWN and (spec := repr(strategy_or_method(call))) not in found:
            found.append(spec)
    return found


@lru_cache(maxsize=1)
def measurements() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((files("laconic.tools.cli") / FIGURES).read_text(encoding="utf-8"))
    return found


@lru_cache(maxsize=1)
def figures() -> dict[str, Measured]:
    return {
        spec: Measured(**{**row, "sent": tuple(row["sent"])})
        for spec, row in measurements()["figures"].items()
    }


def headline(make: Callable[..., Any]) -> str:
    """Return the first sentence of the module's docstring, without the name.

    >>> headline(find("ring"))
    "each rank with its two neighbours (D-PSGD's graph, Lian et al. 2017, arXiv:1705.09056)"
    """
    first = (sys.modules[make.__module__].__doc__ or "").strip().split("\n")[0]
    sentence = re.split(r"\. (?=[A-Z])", first.partition(": ")[2] or first)[0]
    return sentence if sentence.endswith("...") else sentence.removesuffix(".")


def codec_of(route: Route) -> Codec | None:
    """Return the codec that causes a route's error: `dense()` for an exact sum, None if no single one."""
    if isinstance(route.reducer, Sum) and route.reducer.feedback_codec() is None:
        return Dense()
    return route.reducer.feedback_codec()


def _entry(name: str, make: Callable[..., Any], spec: str) -> CatalogueEntry:
    bases = inspect.getmro(make) if inspect.isclass(make) else (type(make),)
    made = strategy_or_method(spec)
    method = made if isinstance(made, Method) else None
    codecs = [None] if method is None else [codec_of(route) for route in method.routes]
    return CatalogueEntry(
        name=name,
        spec=spec,
        kind=next(kind for kind, base in KINDS.items() if base in bases),
        sends=make.sends if isinstance(make, Paper) else headline(make),
        paper=getattr(make, "paper", "-"),
        status=getattr(make, "status", "own"),
        needs="" if method is None else ", ".join(rule.wants for rule in method.rules),
        unbiased=None if None in codecs else all(codec.unbiased for codec in codecs if codec is not None),
        max_bits=None if method is None else 8 * method.nbytes(MATRICES) / MATRICES.numel,
        measured=figures().get(spec),
    )
