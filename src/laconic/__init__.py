"""Distributed deep learning in few words: train over slow links, send what matters, keep the accuracy.

handle = laconic.compress(ddp_model, optimizer, "dgc(density=0.001, warmup_steps=400)")
"""

from laconic.core import starting as _starting  # noqa: F401  # isort: skip  # first, as the rest takes seconds

from laconic import activations as activations
from laconic import admm as admm
from laconic import data as data
from laconic import federated as federated
from laconic import integrations as integrations
from laconic import lowbit as lowbit
from laconic import optim as optim
from laconic import pipeline as pipeline
from laconic import recipes as recipes
from laconic import sparsity as sparsity
from laconic.core.codec import Codec as Codec
from laconic.core.spec import parse as parse
from laconic.core.version import VERSION as __version__
from laconic.ddp.compress import compress as compress
from laconic.exchange.state import resize as resize
from laconic.methods import catalogue as catalogue
from laconic.replicator import Replicator as Replicator
from laconic.strategies.distribute import distribute as distribute

__all__ = [
    "Codec",
    "Replicator",
    "__version__",
    "activations",
    "admm",
    "catalogue",
    "compress",
    "data",
    "distribute",
    "federated",
    "integrations",
    "lowbit",
    "optim",
    "parse",
    "pipeline",
    "recipes",
    "resize",
    "sparsity",
]
