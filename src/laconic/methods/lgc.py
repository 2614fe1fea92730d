"""LGC, learned gradient compression: dense steps, then top-k steps that train a net, then the net's codes.

Abrahamyan et al. 2021, arXiv:2103.08870. Phases, net and dense layers follow an unofficial implementation of
the parameter-server instance, here `per_node`; the ring instance is from memory of the paper. Our
changes: `laconic.reducers.learned_code`.
"""

from __future__ import annotations

from typing import Literal, get_args

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.layout import Entry, Layout
from laconic.exchange.method import Method, Route, everything, matrices, method, routes
from laconic.feedback.error_feedback import ErrorFeedback, Momentum
from laconic.reducers import Reducer
from laconic.reducers.cltk import CLTk
from laconic.reducers.dense_first import DenseFirst
from laconic.reducers.learned_code import Instance, LearnedCode
from laconic.reducers.sum import Sum

Last = Literal["dense", "topk"]


@method(
    paper="Abrahamyan et al. 2021, arXiv:2103.08870",
    status="reconstruction",
    sends="the positions of one rank's largest entries, and a learned code of all ranks' values there",
    examples=(
        "lgc(density=0.01)",
        "lgc(density=0.01, instance='server')",
        "lgc(density=0.01, instance='per_node')",
        "lgc(density=0.01, last_layer='topk')",
    ),
)
def lgc(
    density: float = 0.001,
    *,
    instance: Instance = "ring",
    innovation: float = 1e-5,
    dense_steps: int = 200,
    train_steps: int = 300,
    last_layer: Last = "dense",
    momentum: Momentum = "local",
) -> Method:
    """Per tensor of two dimensions and more, except the first and the last, with error feedback:

        1. `dense_steps` steps: summed uncompressed
        2. `train_steps` steps: the values at a leader's largest entries, which train a net; leaders change
        3. from then on: codes of these values, a quarter as long

    Other tensors are summed uncompressed. Payload in phase 3, with k = density * n: k bytes of code, and k
    (log2(1 / density) + 1.5) bits from the leader.

    More `train_steps` lose less (docs/own_rates.md). The code is not better than exact entries of as many
    bytes: for accuracy per byte, use `topk` at a lower density.

    Args:
        density: Share of entries sent, in (0, 1].
        instance: "ring" averages the codes of all ranks; "server" sends one rank's code, and the `innovation`
            * n largest values of each rank; "per_node" adds a decoder for each rank, as in the paper.
        innovation: Share of entries that each rank adds without "ring".
        dense_steps: Steps of phase 1, 0 or more.
        train_steps: Steps of phase 2, 1 or more.
        last_layer: "dense" sums the last layer; "topk", as we remember the paper, sends its density * n
            largest entries after phase 1 by `cltk`, with error feedback.
        momentum: As for `stc`.

    Raises:
        SpecError: An argument is out of range, or the model has fewer than three matrices.

    >>> lgc(density=0.01, dense_steps=100)
    lgc(density=0.01, dense_steps=100)
    """
    arguments.whole("lgc: dense_steps", dense_steps)
    arguments.whole("lgc: train_steps", train_steps, 1, hint="an untrained net carries little")
    arguments.choice("lgc: last_layer", last_layer, get_args(Last))
    coded = after(dense_steps, LearnedCode(density, dense_steps + train_steps, instance, innovation))
    largest = after(dense_steps, CLTk(density))
    feedback = ErrorFeedback(momentum=momentum)
    last = () if last_layer == "dense" else (Route(is_last, largest, feedback),)
    return routes(Route(is_inner, coded, feedback), *last, Route(everything, Sum()))


def after(steps: int, reducer: Reducer) -> Reducer:
    return DenseFirst(reducer, steps) if steps else reducer


def is_inner(entry: Entry, model: Layout) -> bool:
    weights = [each.name for each in model if matrices(each, model)]
    if len(weights) < 3:
        raise SpecError(
            "lgc does not compress a model's first and last matrix, so it needs three or more: this model"
            f" has {len(weights)}; use learned_code(), which compresses every matrix"
        )
    return entry.name in weights[1:-1]


def is_last(entry: Entry, model: Layout) -> bool:
    return entry.name == [each.name for each in model if matrices(each, model)][-1]
