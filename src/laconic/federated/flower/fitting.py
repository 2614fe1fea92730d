"""Which strategies of Flower's go with compressed updates, and with which codecs.

Each is refused with its reason before any node is asked: a run that ends well and has learned nothing is
worse than one that does not begin.
"""

from __future__ import annotations

from typing import Any

import torch
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    FedMedian,
    FedTrimmedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    Strategy,
)

from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.core.turn import Turn
from laconic.federated.coding import LATE, Coding

SHAPE = (256, 256)  # of the tensor that tells how many entries a codec sends
MOST_ZEROS = 0.5  # of an update's entries, for a median over clients to move at all


def check_fits(strategy: Strategy, up: Any, max_norm: float | None) -> None:
    """Raise `SpecError` for a strategy that cannot be compressed, or not with this `up` and `max_norm`."""
    _check_privacy(strategy, max_norm)
    each = innermost(strategy)
    if isinstance(each, (FedXgbBagging, FedXgbCyclic)):
        raise SpecError(
            f"the model of {type(each).__name__} is trees in one array of bytes, of which there is no"
            " difference to send: leave compressed() out"
        )
    if _takes_each_entry_apart(each) and (zeros := _zeros(up)) > MOST_ZEROS:
        raise SpecError(
            f"{type(each).__name__} takes a median or a trimmed mean of each entry, and {up} leaves"
            f" {100 * zeros:.0f} % of each client's at zero: hardly any would ever move. Take a codec that"
            " sends every entry, such as qsgd(levels=7), sign() or fp16(); Krum goes with sparse ones too"
        )


def innermost(strategy: Strategy) -> Any:
    """The strategy inside all wrappers."""
    found: Any = strategy
    while isinstance(getattr(found, "strategy", None), Strategy):
        found = found.strategy
    return found


def _takes_each_entry_apart(strategy: Any) -> bool:
    trims = isinstance(strategy, FedTrimmedAvg) and strategy.beta > 0
    drops = isinstance(strategy, Bulyan) and strategy.num_malicious_nodes > 0
    return isinstance(strategy, FedMedian) or trims or drops


def _zeros(up: Any) -> float:
    """The share of the entries of a normally distributed update that come out as zero."""
    coding = Coding.up(up, Layout.of([("w", SHAPE)]))
    x = torch.randn(
        coding.layout.numel,
        generator=torch.Generator("cpu").manual_seed(0),
        dtype=torch.float32,
        device="cpu",
    )
    came = coding.decode_add_(coding.encode(x, Turn(LATE)), torch.zeros_like(x), LATE)
    return float((came == 0).float().mean())


def _check_privacy(strategy: Strategy, max_norm: float | None) -> None:
    if isinstance(strategy, DifferentialPrivacyClientSideAdaptiveClipping):
        raise SpecError(
            "clients' adaptive clipping bounds each update, and a compressed one carries what was held"
            " back before too: take DifferentialPrivacyServerSideAdaptiveClipping"
        )
    if isinstance(strategy, DifferentialPrivacyClientSideFixedClipping):
        norm = float(strategy.clipping_norm)
        if max_norm is None or not max_norm <= norm:
            raise SpecError(
                "clients clip each update, and a compressed one carries what was held back before too:"
                f" give max_norm={norm:g}, the clipping norm, got {max_norm}"
            )
