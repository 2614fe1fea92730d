"""Compatibility of Flower's strategies with compressed updates."""

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

SHAPE = (256, 256)
MOST_ZEROS = 0.5  # above this share a median over clients may stay at zero


def check_fits(strategy: Strategy, up: Any, max_norm: float | None) -> None:
    """Raise `SpecError` if a strategy does not fit this `up` and `max_norm`."""
    _check_privacy(strategy, max_norm)
    each = innermost(strategy)
    if isinstance(each, (FedXgbBagging, FedXgbCyclic)):
        raise SpecError(
            f"the model of {type(each).__name__} is a set of trees in one array of bytes, which has no"
            " difference to send: use it without compressed()"
        )
    if _takes_each_entry_apart(each) and (zeros := _zeros(up)) > MOST_ZEROS:
        raise SpecError(
            f"{type(each).__name__} takes a median or a trimmed mean of each entry, and {up} leaves"
            f" {100 * zeros:.0f} % of each client's at zero: hardly any would ever change. Use a codec that"
            " sends every entry, such as qsgd(levels=7), sign() or fp16(); Krum supports sparse ones too"
        )


def innermost(strategy: Strategy) -> Any:
    found: Any = strategy
    while isinstance(getattr(found, "strategy", None), Strategy):
        found = found.strategy
    return found


def _takes_each_entry_apart(strategy: Any) -> bool:
    trims = isinstance(strategy, FedTrimmedAvg) and strategy.beta > 0
    drops = isinstance(strategy, Bulyan) and strategy.num_malicious_nodes > 0
    return isinstance(strategy, FedMedian) or trims or drops


def _zeros(up: Any) -> float:
    """Return the share of a normal update's entries that decode to zero."""
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
            "clients' adaptive clipping bounds each update, and a compressed one also carries the residual"
            " of earlier rounds: use DifferentialPrivacyServerSideAdaptiveClipping"
        )
    if isinstance(strategy, DifferentialPrivacyClientSideFixedClipping):
        norm = float(strategy.clipping_norm)
        if max_norm is None or not max_norm <= norm:
            raise SpecError(
                "clients clip each update, and a compressed one also carries the residual of earlier rounds:"
                f" pass max_norm={norm:g}, the clipping norm, got {max_norm}"
            )
