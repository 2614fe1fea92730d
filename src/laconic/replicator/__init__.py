"""Replicator: run a script written for one device in a deployment named by a string."""

from laconic.replicator.inputs import PER_REPLICA as PER_REPLICA
from laconic.replicator.inputs import PER_WORKER as PER_WORKER
from laconic.replicator.inputs import SINGLE as SINGLE
from laconic.replicator.inputs import InputContext as InputContext
from laconic.replicator.optimizer import ReplicatedOptimizer as ReplicatedOptimizer
from laconic.replicator.replicator import Replicator as Replicator
from laconic.replicator.stats import ReplicatorStats as ReplicatorStats

__all__ = [
    "PER_REPLICA",
    "PER_WORKER",
    "SINGLE",
    "InputContext",
    "ReplicatedOptimizer",
    "Replicator",
    "ReplicatorStats",
]
