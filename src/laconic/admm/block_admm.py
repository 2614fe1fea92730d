"""Stochastic Block-ADMM: blocks train side by side, each on its own mini-batch sub-problem.

Khorram et al. 2021, arXiv:2105.00339. A reconstruction: only the abstract was at hand, the rest is standard
ADMM and ours. With f_n the blocks, T_n their parameters, X_n their outputs and U_n scaled duals, by sample:

    L = loss(f_N(X_{N-1}; T_N), y) + sum over n < N of beta/2 |X_n - f_n(X_{n-1}; T_n) + U_n|^2,  X_0 input

    X_n, U_n <- a forward pass and 0                (first visit, or mode 'online')
                stored, then U_n += dual (X_n - f_n), X_n <- prox(X_n - rate (X_n - f_n + U_n))
    T_n      <- `steps` steps of an optimiser on the block's own term
    X_n      <- `steps` steps prox(X_n - rate (X_n - f_n + U_n + G / beta)), G the gradient of the next term

Block n + 1 owns X_n and U_n, and sends X_n + U_n, all that block n needs of them. Each mini-batch passes
the blocks twice, forward as activations and back as targets, and in between they work on others: in each
tick all blocks train, each on a mini-batch of its own, and no block waits for a whole pass. Back-propagation
stays inside blocks.

Differences from a text-book ADMM: a block sees a mini-batch's targets 2 (N - n) ticks after its forward pass,
as blocks work on different ones. Duals follow at the next visit of a sample, with f_n as it is then, and
X_n first has a step on the penalty alone: a sample is seen once in an epoch, and blocks have moved meanwhile.
For the same reason `dual` is below 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from laconic.codecs.dense import Dense
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.selector import Selector
from laconic.core.spec import Spec, Status
from laconic.exchange.method import lift_codec

Mode = Literal["online", "batch"]


@dataclass(frozen=True, repr=False)
class BlockAdmm(Spec):
    """Blocks of one model, one on each worker, that train at the same time: no method of `compress`.

    Wire, for each sample and boundary: f_n forward by `activations`, X_n + U_n back by `targets`: as float32
    4 bytes an element each, what a pipeline sends; and 8 bytes a message.

    Args:
        blocks: How many, 2 or more.
        beta: The penalty. Smaller: targets are further from what a block gives.
        steps: Steps of T and X for each mini-batch; the first of both are from the same point.
        rate: Step of X in units of 1 / beta, in (0, 2); 1 solves the penalty's own part in one step.
        dual: Step of the duals in mode 'batch', in [0, 1]; 0: none, a penalty method.
        mode: 'online' forgets X and U after each mini-batch, so duals are always 0; 'batch' stores them by
            sample id.
        cut: Names of the children that begin the second block and those after; default: by layers.
        activations: Codec of f_n. With targets, any codec; one that is biased distorts what is sent.
        targets: Codec of X_n + U_n.
        keep: Codec of stored X and U, of fixed size.
    """

    blocks: int = 2
    beta: float = 1.0
    steps: int = 1
    rate: float = 1.0
    dual: float = 0.1
    mode: Mode = "online"
    cut: tuple[str, ...] = ()
    activations: Codec = field(default_factory=Dense)
    targets: Codec = field(default_factory=Dense)
    keep: Codec = field(default_factory=Dense)

    paper: ClassVar[str] = "Khorram et al. 2021, arXiv:2105.00339"
    status: ClassVar[Status] = "reconstruction"
    examples: ClassVar[tuple[str, ...]] = (
        "block_admm(blocks=3)",
        "block_admm(blocks=3, mode='batch', targets=minmax(bits=8))",
    )

    def __post_init__(self) -> None:
        arguments.whole("block_admm: blocks", self.blocks, 2, hint="one block is plain training")
        arguments.number("block_admm: beta", self.beta, above=0)
        arguments.whole("block_admm: steps", self.steps, 1)
        arguments.number("block_admm: rate", self.rate, above=0, below=2)
        arguments.number("block_admm: dual", self.dual, least=0, most=1)
        arguments.choice("block_admm: mode", self.mode, get_args(Mode))
        arguments.names("block_admm: cut", self.cut, "3")
        if self.cut and len(self.cut) != self.blocks - 1:
            raise SpecError(
                f"block_admm: cut must name where blocks 2 to {self.blocks} begin, {self.blocks - 1} names,"
                f" got {arguments.shown(self.cut)}"
            )
        for name in ("activations", "targets", "keep"):
            given = getattr(self, name)
            if isinstance(given, Selector):
                object.__setattr__(self, name, lift_codec(given))
            arguments.piece(f"block_admm: {name}", getattr(self, name), Codec, "minmax(bits=8)")
        if not self.keep.fixed_size:
            raise SpecError(
                f"block_admm: keep must be a codec whose wires have one size, such as cast('fp16') or"
                f" minmax(bits=8), got {self.keep!r}"
            )
