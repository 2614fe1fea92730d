"""LGC, learned gradient compression: dense steps, then top-k steps that train a net, then the net's codes.

Abrahamyan et al. 2021, arXiv:2103.08870. A reconstruction, as no code of the authors is known to us: phases,
their lengths, the net and the layers that stay dense are those of a third party's implementation of the
parameter-server instance; the ring instance is from memory. What is ours stands in `learned_code`.
"""

from __future__ import annotations

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.layout import Entry, Layout
from laconic.feedback.error_feedback import ErrorFeedback
from laconic.reducers.dense_first import DenseFirst
from laconic.reducers.learned_code import Instance, LearnedCode
from laconic.reducers.reducer import Reducer
from laconic.reducers.sum import Sum
from laconic.strategies.method import Method, Route, everything, matrices, method, routes


@method(
    paper="Abrahamyan et al. 2021, arXiv:2103.08870",
    status="reconstruction",
    sends="where one rank's largest entries are, and a learned code of everyone's values there",
    examples=("lgc(density=0.01)", "lgc(density=0.01, instance='server')"),
)
def lgc(
    density: float = 0.001,
    *,
    instance: Instance = "ring",
    innovation: float = 1e-5,
    dense_steps: int = 200,
    train_steps: int = 300,
) -> Method:
    """Per tensor of two dimensions and more but the first and the last, with error feedback:

        1. `dense_steps` steps: summed as they are
        2. `train_steps` steps: the values at the largest entries of a leader that changes; they train a net
        3. from then on: codes of these values, a quarter as long

    The first and the last of these tensors, a model's first and last layer, are summed as they are, and so
    are tensors of one dimension. (From memory, the paper has the last layer's largest entries instead.)
    `instance`: 'ring' averages the codes of all ranks; 'server' has one rank's code and the `innovation` * n
    largest values of each. Payload in phase 3, with k = density * n: k bytes of code, and of the leader
    k (log2(1 / density) + 1.5) bits. Optimiser and momentum are the user's.

    >>> lgc(density=0.01, dense_steps=100)
    lgc(density=0.01, dense_steps=100)
    """
    arguments.whole("lgc: dense_steps", dense_steps)
    arguments.whole("lgc: train_steps", train_steps, 1, way_out="an untrained net carries little")
    reducer: Reducer = LearnedCode(density, dense_steps + train_steps, instance, innovation)
    if dense_steps:
        reducer = DenseFirst(reducer, dense_steps)
    return routes(Route(is_inner, reducer, ErrorFeedback()), Route(everything, Sum()))


def is_inner(entry: Entry, model: Layout) -> bool:
    """Whether it is a tensor of two dimensions and more, but neither the first nor the last of these."""
    weights = [each.name for each in model if matrices(each, model)]
    if len(weights) < 3:
        raise SpecError(
            "lgc leaves a model's first and last matrix as they are, so it needs three or more: this model"
            f" has {len(weights)}; use learned_code(), which takes every matrix"
        )
    return entry.name in weights[1:-1]
