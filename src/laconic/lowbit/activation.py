"""Rounding of activations between running minima and maxima."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laconic.core.turn import mix, name_key
from laconic.lowbit.grid import Precision, straight
from laconic.lowbit.recomputation import RecomputedCalls, is_recomputed

DECAY = 0.1  # share of running values kept per batch


class Activation(nn.Module):
    """Rounds x (n, ...) of n examples to 2^bits values, float32; gradients pass unchanged.

    In training the ends are the means of the examples' minima and maxima; evaluation uses the running values
    `low` and `high`. Random bits depend only on the seed and `turns`, the training batches: resumed training
    has the same bits.

    >>> layer = Activation(Precision(bits=2))
    >>> layer(torch.tensor([[0.0, 0.4, 3.0], [0.0, 1.2, 3.0]]))
    tensor([[0., 0., 3.],
            [0., 1., 3.]])
    """

    low: Tensor
    high: Tensor
    turns: Tensor

    def __init__(self, precision: Precision, device: torch.device | None = None) -> None:
        super().__init__()
        self.precision = precision
        self.register_buffer("low", torch.zeros((), dtype=torch.float32, device=device))
        self.register_buffer("high", torch.zeros((), dtype=torch.float32, device=device))
        self.register_buffer("turns", torch.zeros((), dtype=torch.int64, device=device))
        self._turn = 0
        self._repeats = RecomputedCalls()

    def forward(self, x: Tensor) -> Tensor:
        self._begin(x)
        low, high = self._ends(x.detach().float())
        key = self.key("activation") if self.precision.rounding == "stochastic" else None
        return straight(x.float(), low, high, self.precision.bits, key)

    def key(self, name: str) -> int:
        return mix(self.precision.seed, self._turn, name_key(name))

    def _begin(self, x: Tensor) -> None:
        again = is_recomputed(self.training)
        if self.training and not again:
            self.turns += 1
        self._turn = int(self.turns)
        if self.training:
            self._turn = self._repeats.turn(self._turn, again, x)

    def _ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if (not self.training and int(self.turns)) or not x.numel():
            return self.low, self.high
        examples = x.reshape(len(x), -1) if x.dim() > 1 else x[None]
        low, high = examples.amin(1).mean(), examples.amax(1).mean()
        if self.training and not is_recomputed(self.training):
            self.low.mul_(DECAY).add_(low, alpha=1 - DECAY)
            self.high.mul_(DECAY).add_(high, alpha=1 - DECAY)
        return low, high

    def extra_repr(self) -> str:
        return f"bits={self.precision.bits}, rounding={self.precision.rounding!r}"
