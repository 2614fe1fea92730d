"""Strategies of `laconic.distribute`: which ranks exchange parameters, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laconic.core.lazy import name_makers

if TYPE_CHECKING:
    from laconic.strategies.gossip.adpsgd import ADPSGD as adpsgd
    from laconic.strategies.gossip.choco import CHOCO as choco
    from laconic.strategies.gossip.deepsqueeze import DeepSqueeze as deepsqueeze
    from laconic.strategies.gossip.dpsgd import DPSGD as dpsgd
    from laconic.strategies.gossip.lpdt import LPDT as lpdt
    from laconic.strategies.gossip.osgp import OSGP as osgp
    from laconic.strategies.gossip.quasi_global import QuasiGlobal as quasi_global
    from laconic.strategies.gossip.sgp import SGP as sgp
    from laconic.strategies.leaders.by_machine import ByMachine as by_machine
    from laconic.strategies.leaders.easgd import EASGD as easgd
    from laconic.strategies.leaders.lsgd import LSGD as lsgd
    from laconic.strategies.local_steps.diloco import DiLoCo as diloco
    from laconic.strategies.local_steps.local_sgd import LocalSGD as local_sgd
    from laconic.strategies.local_steps.noloco import NoLoCo as noloco
    from laconic.strategies.local_steps.slowmo import SlowMo as slowmo
    from laconic.strategies.local_steps.sparseloco import SparseLoCo as sparseloco

__all__ = [
    "adpsgd",
    "by_machine",
    "choco",
    "deepsqueeze",
    "diloco",
    "dpsgd",
    "easgd",
    "local_sgd",
    "lpdt",
    "lsgd",
    "noloco",
    "osgp",
    "quasi_global",
    "sgp",
    "slowmo",
    "sparseloco",
]

name_makers(__name__)
