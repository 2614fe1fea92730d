"""Distributed deep learning in few words: train over slow links, send what matters, keep the accuracy.

handle = laconic.compress(ddp_model, optimizer, "dgc(density=0.001, warmup_steps=400)")

`import laconic` does not import torch: each public name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from laconic.core.lazy import import_lazily

if TYPE_CHECKING:
    from laconic import activations as activations
    from laconic import admm as admm
    from laconic import codecs as codecs
    from laconic import data as data
    from laconic import federated as federated
    from laconic import feedback as feedback
    from laconic import indices as indices
    from laconic import integrations as integrations
    from laconic import lowbit as lowbit
    from laconic import methods as methods
    from laconic import optim as optim
    from laconic import pipeline as pipeline
    from laconic import recipes as recipes
    from laconic import reducers as reducers
    from laconic import selectors as selectors
    from laconic import sparsity as sparsity
    from laconic import strategies as strategies
    from laconic import topologies as topologies
    from laconic.core.codec import Codec as Codec
    from laconic.core.spec import parse as parse
    from laconic.core.version import __version__ as __version__
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
    "codecs",
    "compress",
    "data",
    "distribute",
    "federated",
    "feedback",
    "indices",
    "integrations",
    "lowbit",
    "methods",
    "optim",
    "parse",
    "pipeline",
    "recipes",
    "reducers",
    "resize",
    "selectors",
    "sparsity",
    "strategies",
    "topologies",
]

import_lazily(
    __name__,
    {
        "Codec": "laconic.core.codec",
        "Replicator": "laconic.replicator",
        "__version__": "laconic.core.version",
        "catalogue": "laconic.methods",
        "compress": "laconic.ddp.compress",
        "distribute": "laconic.strategies.distribute",
        "parse": "laconic.core.spec",
        "resize": "laconic.exchange.state",
    },
)
