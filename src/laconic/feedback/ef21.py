"""EF21: ranks send changes of their gradient estimates, and all add these to one mean estimate.

On rank i, with its gradient g, its estimate v_i and the others' copy h_i of it, all zero at first:

    v_i <- (1 - eta) v_i + eta g          c_i = C(v_i - h_i)
    h_i <- h_i + c_i                      G <- G + mean_j c_j,  the optimiser's gradient

Richtarik, Sokolov, Fatkhullin 2021, arXiv:2106.05203 (eta = 1); with momentum Fatkhullin, Tyurin, Richtarik
2023, arXiv:2305.15155 (EF21-SGDM). Unlike error feedback, it does not need gradients that are bounded and
similar on all ranks. The papers begin with v_i = h_i = a first gradient, sent uncompressed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic import kernels
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.layout import Layout
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.feedback import BoundFeedback, Feedback, Optimised, Share
from laconic.feedback.memory import Memory, Pending, copied, mark_overflow_
from laconic.feedback.memory.contraction import safe_gain


@dataclass(frozen=True, repr=False)
class EF21(Feedback):
    """Estimates v and G, and the difference v - h: three float32 per element.

    `eta` in (0, 1]: weight of the newest gradient; 1 - eta is the momentum.

    >>> EF21(eta=0.1)
    ef21(eta=0.1)
    """

    paper: ClassVar[str] = "Richtarik et al. 2021, arXiv:2106.05203"
    status: ClassVar[Status] = "recalled"

    eta: float = 1.0

    def __post_init__(self) -> None:
        arguments.number("eta", self.eta, above=0, most=1)

    def gain(self, codec: Codec | None, layout: Layout) -> float:
        return safe_gain(codec, layout)

    def bind(self, layout: Layout, optimised: Optimised, size: int) -> BoundFeedback:
        return _Estimates(layout, self.eta)


class _Estimates(BoundFeedback):
    """Estimates of one rank; `_difference` is v - h."""

    replaces_mean: ClassVar[bool] = True

    def __init__(self, layout: Layout, eta: float) -> None:
        self._eta = eta
        self._estimate = Memory("estimate", layout)  # v
        self._difference = Memory("residual", layout)
        self._mean = Memory("mean", layout)  # G
        self._pending: Pending[tuple[Share, Tensor]] = Pending(self._finish)
        self._old: dict[int, tuple[Tensor, Tensor]] = {}  # old v and v - h, by layout
        self._shares: dict[int, Share] = {}  # settled, before the mean

    def _finish(self, sent: tuple[Share, Tensor], layout: Layout) -> None:
        share, mean = sent
        share.subtract_from_(self._difference.held(layout))
        kernels.accumulate_(self._mean.held(layout), mean, layout.segments)

    def correct(
        self, grad: Tensor, layout: Layout, turn: Turn, scale: float = 1.0, *, free: bool = False
    ) -> Tensor | None:
        self._pending.finish_before(turn.step)
        estimate = self._estimate.flat(layout, grad.device)
        difference = self._difference.flat(layout, grad.device)
        self._mean.flat(layout, grad.device)
        segments, eta = layout.segments, self._eta
        old = grad if free else copied(grad, layout)
        if not kernels.accumulate_(estimate, old, segments, eta * scale, 1 - eta, keep=True):
            kernels.undo_(estimate, old, segments)
            mark_overflow_(grad, old, layout)
            return None
        self._old[id(layout)] = old, copied(difference, layout)
        kernels.accumulate_(difference, old, segments, scale=-1)
        if not kernels.accumulate_(difference, estimate, segments):
            total = self._old[id(layout)][1] - old[: len(estimate)] + estimate
            self.put_back(layout)
            mark_overflow_(grad, total, layout)
            return None
        return difference

    def settle(self, share: Share, layout: Layout, turn: Turn) -> None:
        self._shares[id(layout)] = share

    def receive_(self, mean: Tensor, layout: Layout, turn: Turn, scale: float) -> None:
        came = mean.clone()
        layout.segments.scale_(came, 1 / scale)
        self._pending.add((self._shares.pop(id(layout)), came), layout, turn.step)
        kernels.accumulate_(mean, self._mean.held(layout), layout.segments, scale=scale)

    def put_back(self, layout: Layout) -> None:
        self._shares.pop(id(layout), None)
        self._pending.drop(layout)
        old = self._old.pop(id(layout), None)
        if old is not None:
            estimate, difference = old
            kernels.undo_(self._estimate.held(layout), estimate, layout.segments)
            kernels.undo_(self._difference.held(layout), difference, layout.segments)

    def accept(self, layout: Layout) -> None:
        self._old.pop(id(layout), None)

    def discard(self) -> None:
        self._pending.clear()
        self._old.clear()
        for memory in (self._estimate, self._difference, self._mean):
            memory.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        self._pending.finish_all()
        return {
            **self._estimate.state_dict(),
            **self._difference.state_dict(),
            **self._mean.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        memories = (self._estimate, self._difference, self._mean)
        for memory in memories:
            memory.check(state)
        self._pending.finish_all()
        for memory in memories:
            memory.load_state_dict(state)
