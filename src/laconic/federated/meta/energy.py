"""Energy of meta-training: computation and radio transmission.

    E = flops * cycles/flop * J/cycle + 8 * (up + down bytes) * J/bit

The form follows P-SGA's abstract and the literature on wireless learning, recalled. The constants are
assumptions; the ranking of methods depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass

from laconic.core import arguments
from laconic.federated.meta.trained import Trained


@dataclass(frozen=True)
class Energy:
    """Energy prices. All defaults are assumptions.

    cycles_per_flop: 1, a scalar core.
    joules_per_cycle: kappa f^2, with capacitance kappa = 1e-28 (Tran et al. 2019, INFOCOM; recalled) at f = 1
        GHz: 1e-10.
    joules_per_bit: 0.2 W at 1 Mbit/s, in either direction: 2e-7.
    """

    cycles_per_flop: float = 1.0
    joules_per_cycle: float = 1e-10
    joules_per_bit: float = 2e-7

    def __post_init__(self) -> None:
        for name in ("cycles_per_flop", "joules_per_cycle", "joules_per_bit"):
            arguments.number(name, getattr(self, name), least=0)

    def computing(self, trained: Trained) -> float:
        """Joules of all agents' computation."""
        return trained.flops * self.cycles_per_flop * self.joules_per_cycle

    def sending(self, trained: Trained) -> float:
        """Joules of all messages, in both directions."""
        return 8 * (trained.up_nbytes + trained.down_nbytes) * self.joules_per_bit

    def joules(self, trained: Trained) -> float:
        return self.computing(trained) + self.sending(trained)
