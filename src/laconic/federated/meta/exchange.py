"""Messages between a server and all agents in each round.

        state      H_i += C(v_i - H_i)               H_i: the server's copy of agent i; the loss of C stays
                                                     in the difference (EF21, arXiv:2106.05203)
        update     x_i = e_i + u_i; send C(x_i); e_i = x_i - C(x_i)            error feedback, for biased
        codecs answer     P += C(c - P)                     P: the public model, held by all agents

A lossless codec sends v_i and c themselves. H_i and P start with the common first model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.core.framing import as_bytes, as_numbers
from laconic.core.layout import Layout
from laconic.core.turn import Turn
from laconic.federated.coding import Coding


class Exchange:
    """State of both sides, and bytes so far; an answer counts once per agent.

    Args:
        first: The first model, float32 (n,).
        up, down: Specs or codecs, as for `compress`.
    """

    def __init__(self, layout: Layout, first: Tensor, agents: int, up: Any, down: Any, seed: int = 0) -> None:
        self._states = Coding.down(up, layout)
        self._updates = Coding.up(up, layout)
        self._down = Coding.down(down, layout)
        self._seed = seed
        self.copies = first.repeat(agents, 1)
        self.residuals = torch.zeros_like(self.copies)
        self.public = first.clone()
        self.up_nbytes = self.down_nbytes = 0

    def states(self, values: Tensor, step: int) -> Tensor:
        """Send one message per agent and return the server's copies, (a, n)."""
        for rank, value in enumerate(values):
            self.copies[rank], nbytes = _sent(self._states, value, self.copies[rank], self._turn(step, rank))
            self.up_nbytes += nbytes
        return self.copies

    def updates(self, values: Tensor, step: int) -> Tensor:
        """Send updates (a, n) and return them as decoded."""
        coding, read = self._updates, torch.zeros_like(values)
        for rank, value in enumerate(values):
            turn = self._turn(step, rank)
            if coding.remembers:
                wire = coding.encode(coding.correct_(self.residuals[rank], value), turn)
                coding.settle_(self.residuals[rank], wire, step)
            else:
                wire = coding.encode(value, turn)
            coding.decode_add_(wire, read[rank], step)
            self.up_nbytes += wire.numel()
        return read

    def answer(self, centre: Tensor, step: int, number: float | None = None) -> float:
        """Send the centre (n,), which becomes `public`, and optionally a number, returned as decoded."""
        turn = self._turn(step, len(self.copies))
        self.public, nbytes = _sent(self._down, centre, self.public, turn)
        head = as_bytes(torch.tensor([] if number is None else [number], dtype=torch.float32, device="cpu"))
        self.down_nbytes += len(self.copies) * (head.numel() + nbytes)
        return 0.0 if number is None else float(as_numbers(head, torch.float32)[0])

    def _turn(self, step: int, rank: int) -> Turn:
        return Turn(step, rank, self._seed)


def _sent(coding: Coding, value: Tensor, known: Tensor, turn: Turn) -> tuple[Tensor, int]:
    if coding.lossless:
        wire = coding.encode(value, turn)
        return coding.decode_add_(wire, torch.zeros_like(value), turn.step), wire.numel()
    wire = coding.encode(value - known, turn)
    return coding.decode_add_(wire, known.clone(), turn.step), wire.numel()
