"""`admm`: trains a model whose weights end up in a small table, for recurrent language models above all.

    min F(Theta)  subject to  Theta = G,  G = alpha * q,  q from a table
    Theta  <- steps of the optimiser on F(Theta) + gamma/2 |Theta - G + lambda|^2
    G      <- the nearest to Theta + lambda      (`projection`)
    lambda <- lambda + Theta - G

Xu et al. 2021, arXiv:2111.14836. Our reconstruction from the abstract and the standard method: the tables,
the tied scales and the extra-gradient step are the paper's; gamma and its schedule, how often G moves and
where scales are tied are ours.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.optim import Optimizer

from laconic.lowbit.admm.handle import Admm
from laconic.lowbit.admm.settings import AdmmSettings
from laconic.lowbit.admm.tables import Name
from laconic.lowbit.admm.weights import Tie


def admm(
    model: nn.Module,
    optimizer: Optimizer,
    table: Name = "ternary",
    tie: Tie = "row",
    *,
    gamma: float = 1e-3,
    growth: float = 1.15,
    most: float = 0.1,
    every: int = 50,
    rounds: int = 5,
    start: int = 0,
    extragradient: bool = False,
    keep: Collection[str] = (),
) -> Admm:
    """Draw the matrices of a model's Embedding, LSTM, GRU and Linear layers to a table while it trains.

    The model and the training loop stay as they are: hooks on the optimiser add gamma (Theta - G + lambda) to
    the gradients just before each step, and move G and lambda after every so many steps. That is after
    accumulation, clipping and communication, so with DistributedDataParallel and `laconic.compress` all ranks
    have the same G. Call this before `laconic.compress`, whose hooks must come second. Biases and all other
    parameters stay float32.

    Take SGD: its step follows the penalty's gradient, and Adam's divides it away. Where gamma times the
    learning rate is above 1 the penalty overshoots; `most` is the limit. A step costs one addition more, and
    memory is 2.25 times more than the weights' own (lambda, G - lambda, q).

    Args:
        model: Trained as before, in float32; DistributedDataParallel is looked into.
        optimizer: Trains the matrices, with one gradient a step.
        table: "binary" {-1, 1}, "ternary" {-1, 0, 1} (default), "quinary" {0, +-1, +-2} or "septenary"
            {0, +-1, +-2, +-4}: 1, 1.6, 3 and 3 bits a weight.
        tie: What shares a scale: "row" of a matrix (default), "layer", here a whole matrix, or "model".
        gamma: The penalty's weight at first; default: 1e-3.
        growth: gamma's factor at each update of G; lambda shrinks by as much. Default: 1.15.
        most: gamma's limit; default: 0.1.
        every: Steps from one update of G to the next; default: 50.
        rounds: Alternations of scale and entries in a projection; default: 5.
        start: Steps before the penalty begins; default: 0.
        extragradient: Whether two calls of `optimizer.step()` make one step: a prediction, and the step from
            the same place with the gradient there. For optimisers that step by themselves, so not with
            methods such as `dgc` that bring their own momentum. Takes a much lower learning rate than plain
            steps: where rate times curvature is 1, the prediction is at the minimum, its gradient is 0, and
            the weights drift though the loss of the prediction looks well. Default: False.
        keep: Names of modules that stay float32 with everything inside; default: none.

    Returns:
        The handle: `residual()`, `quantised()` for tests on the way, `state_dict()`, and at the end
        `finish()` and `pack()`.

    Raises:
        SpecError: An argument is out of range.
        AttachError: The model has no such layer, or is drawn to a table already; matrices are shared, not
            float32 or computed by hooks; the optimiser does not train them; `keep` names no module. Nothing
            has changed then.

    >>> import torch
    >>> net = nn.Sequential(nn.Embedding(10, 40), nn.Linear(40, 10))
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    >>> handle = admm(net, optimizer, every=10)
    >>> for _ in range(100):
    ...     loss = nn.functional.cross_entropy(net(torch.arange(10)), torch.arange(10).flip(0))
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    >>> small = handle.pack()
    >>> bool((small(torch.arange(10)) == handle.finish()(torch.arange(10))).all())
    True
    """
    settings = AdmmSettings(table, tie, gamma, growth, most, every, rounds, start, extragradient)
    return Admm(model, optimizer, settings, keep)
