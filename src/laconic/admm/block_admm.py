"""Stochastic Block-ADMM: blocks train concurrently, each on a sub-problem of one mini-batch.

Khorram et al. 2021, arXiv:2105.00339; a reconstruction from the abstract and standard ADMM. f_n: blocks, T_n:
their parameters, X_n: their outputs, U_n: scaled duals per sample.

    L = loss(f_N(X_{N-1}; T_N), y) + sum over n < N of beta/2 |X_n - f_n(X_{n-1}; T_n) + U_n|^2,  X_0 input

    X_n, U_n <- a forward pass and 0                (first visit, or mode 'online')
                stored, then U_n += dual (X_n - f_n), X_n <- prox(X_n - rate (X_n - f_n + U_n))
    T_n      <- `steps` steps of an optimiser on the block's own term
    X_n      <- `steps` steps prox(X_n - rate (X_n - f_n + U_n + G / beta)), G the gradient of the next term

Block n + 1 owns X_n and U_n and sends X_n + U_n to block n. In each tick all blocks train, on different
mini-batches.

Differences from textbook ADMM, because the blocks change during an epoch: targets arrive 2 (N - n) ticks
after the forward pass; duals are updated at the next visit of a sample, with the current f_n, after a step of
X_n on the penalty alone; `dual` is below 1.
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
    """Concurrent training of the blocks of one model, one block per rank; not a method of `compress`.

    Wire per sample and boundary: f_n forward by `activations`, X_n + U_n back by `targets` (float32: 4 bytes
    per element each), plus 8 bytes per message.

    Args:
        blocks: Number of blocks, at least 2.
        beta: Penalty; a smaller one lets targets be further from a block's outputs.
        steps: Steps of T and X per mini-batch; the first of both start from the same point.
        rate: Step of X in units of 1 / beta, in (0, 2); 1 solves the penalty's part in one step.
        dual: Step of the duals in mode 'batch', in [0, 1]; 0: a penalty method.
        mode: 'online' discards X and U after each mini-batch: no duals; 'batch' stores them by sample id.
        cut: Names of the children that begin later blocks; default: equal numbers of layers.
        activations: Codec of f_n; preferably unbiased.
        targets: Codec of X_n + U_n; preferably unbiased.
        keep: Fixed-size codec of stored X and U.
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
                f"block_admm: keep must be a codec of fixed size, such as cast('fp16') or minmax(bits=8), got"
                f" {self.keep!r}"
            )
