"""The settings of ADMM towards a table, checked as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.core import arguments
from laconic.lowbit.admm.tables import Name, Table, table_of
from laconic.lowbit.admm.weights import Tie


@dataclass(frozen=True)
class AdmmSettings:
    """As the arguments of `admm`."""

    table: Name = "ternary"
    tie: Tie = "row"
    gamma: float = 1e-3
    growth: float = 1.15
    most: float = 0.1
    every: int = 50
    rounds: int = 5
    start: int = 0
    extragradient: bool = False

    def __post_init__(self) -> None:
        table_of(self.table)
        arguments.choice("tie", self.tie, ("model", "layer", "row"))
        arguments.number("gamma", self.gamma, above=0)
        arguments.number("growth", self.growth, least=1)
        arguments.number("most", self.most, least=self.gamma)
        arguments.whole("every", self.every, 1)
        arguments.whole("rounds", self.rounds, 1)
        arguments.whole("start", self.start, 0)
        arguments.flag("extragradient", self.extragradient)

    @property
    def its_table(self) -> Table:
        """The table itself."""
        return table_of(self.table)
