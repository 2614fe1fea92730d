"""Compression for the trainers of Lightning, Accelerate, torchft and transformers.

    trainer = lightning.Trainer(devices=2, strategy="ddp", callbacks=[LightningCompression("auto()")])

Each library is an extra, as `pip install '.[lightning]'`, and is imported at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laconic.integrations.accelerate import keep_with as keep_with
    from laconic.integrations.lightning import LightningCompression as LightningCompression
    from laconic.integrations.lightning_strategy import LightningStrategy as LightningStrategy
    from laconic.integrations.torchft import TorchftDDP as TorchftDDP
    from laconic.integrations.transformers import TrainerCompression as TrainerCompression

__all__ = ["LightningCompression", "LightningStrategy", "TorchftDDP", "TrainerCompression", "keep_with"]

HOMES = {
    "LightningCompression": ("lightning", "lightning"),  # module in this package, and library
    "LightningStrategy": ("lightning_strategy", "lightning"),
    "TorchftDDP": ("torchft", "torchft"),
    "TrainerCompression": ("transformers", "transformers"),
    "keep_with": ("accelerate", "accelerate"),
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from laconic.integrations.versions import check

    home, library = HOMES[name]
    check(library, f"laconic.integrations.{name}")
    return getattr(import_module(f"laconic.integrations.{home}"), name)
