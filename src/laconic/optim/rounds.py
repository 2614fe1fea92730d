"""Steps at which 0/1 Adam learns its variance, and at which ranks communicate.

Lu et al. 2022, arXiv:2202.06009, policies of the experiments [recalled].
"""

from __future__ import annotations

from dataclasses import dataclass

from laconic.core import arguments


@dataclass(frozen=True)
class Rounds:
    """Two schedules with growing intervals.

    Before step `freeze_steps` every step is a round, and v is learnt at intervals that double after every
    `kappa` updates. Then the intervals between rounds double after every `double_every` steps, up to
    `longest`. Both start at one step.

    >>> rounds = Rounds(freeze_steps=8, kappa=2, double_every=4, longest=4)
    >>> [step for step in range(8) if rounds.learns(step)]
    [0, 1, 2, 4, 6]
    >>> [step for step in range(8, 30) if rounds.meets(step)]
    [8, 9, 10, 11, 12, 14, 16, 20, 24, 28]
    """

    freeze_steps: int
    kappa: int
    double_every: int
    longest: int

    def __post_init__(self) -> None:
        for name in ("freeze_steps", "kappa", "double_every", "longest"):
            arguments.whole(name, getattr(self, name), 1)

    def learns(self, step: int) -> bool:
        if step >= self.freeze_steps:
            return False
        at, apart = 0, 1
        while at + self.kappa * apart <= step:
            at += self.kappa * apart
            apart *= 2
        return (step - at) % apart == 0

    def meets(self, step: int) -> bool:
        if step < self.freeze_steps:
            return True
        at = self.freeze_steps
        while at < step:
            apart = self.apart(at)
            until = step if apart == self.longest else min(step, at + self.double_every - self._into(at))
            at += apart * max(1, -(-(until - at) // apart))
        return at == step

    def apart(self, step: int) -> int:
        if step < self.freeze_steps:
            return 1
        doublings = (step - self.freeze_steps) // self.double_every
        return min(self.longest, 1 << min(doublings, 30))

    def _into(self, step: int) -> int:
        return (step - self.freeze_steps) % self.double_every
