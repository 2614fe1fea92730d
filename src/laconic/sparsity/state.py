"""Validation of a state of sparse training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laconic import kernels
from laconic.core.errors import StateError
from laconic.sparsity.densities import DensityLayout, entries

MUST_MATCH = ("format", "sparsifier", "steps", "seed")


def read_state(
    state: Any,
    own: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    limits: Mapping[str, tuple[int, int]],
    layout: DensityLayout,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return masks (bool) and scores (float32), shaped like the weights.

    Raises `StateError` if the state is damaged or of another training than `own`. `limits`: least and
    most entries in use.
    """
    if isinstance(state, Mapping) and state.get("format") == 1:
        state, own = {**state, "nonzero": {}, "format": own["format"]}, {**own, "nonzero": {}}
    if not isinstance(state, Mapping) or state.keys() != own.keys():
        held = ", ".join(sorted(map(str, state))[:3]) if isinstance(state, Mapping) else repr(state)
        raise StateError(f"this is not a state of sparse training: it has {held}")
    for key in MUST_MATCH:
        if type(state[key]) is not type(own[key]) or state[key] != own[key]:
            raise StateError(f"saved with {key} {state[key]!r}, but this training has {own[key]!r}")
    if type(state["turn"]) is not int or type(state["updates"]) is not int:
        raise StateError(f"turn and updates must be integers, got {state['turn']!r} and {state['updates']!r}")
    if type(state["changed"]) not in (int, float):
        raise StateError(f"changed must be a number, got {state['changed']!r}")
    counts = state["nonzero"]
    if not isinstance(counts, Mapping) or counts.keys() != own["nonzero"].keys():
        raise StateError("nonzero has counts of other weights: sparsify the same model with the same keep=")
    if any(type(count) is not int for count in counts.values()):
        raise StateError(f"nonzero must have an integer per weight, got {counts!r}")
    masks, scores = state["masks"], state["scores"]
    if not isinstance(masks, Mapping) or masks.keys() != weights.keys():
        raise StateError("saved for other weights: sparsify the same model with the same keep=")
    if not isinstance(scores, Mapping) or not scores.keys() <= weights.keys():
        raise StateError("saved with scores of other weights: sparsify the same model with the same keep=")
    return (
        {name: _mask(name, bits, weights[name], limits[name], layout) for name, bits in masks.items()},
        {name: _score(name, score, weights[name]) for name, score in scores.items()},
    )


def limits(
    weights: Mapping[str, Tensor], last: Mapping[str, float], first: Mapping[str, float]
) -> dict[str, tuple[int, int]]:
    sizes = {name: weights[name].numel() for name in last}
    return {name: (entries(last[name], n), entries(first[name], n)) for name, n in sizes.items()}


def check_not_zeroed(
    weights: Mapping[str, Tensor],
    present: Mapping[str, Tensor],
    saved: Mapping[str, Tensor],
    nonzero: Mapping[str, int],
) -> None:
    """Raise `StateError` if `sparsify` zeroed saved weights because the model was loaded before it.

    Then all entries only in the saved masks are zero, and fewer weights are nonzero than when saved.
    """
    held = {name: weights[name].detach() for name in saved}
    now = sum(int(held[name][used].count_nonzero()) for name, used in saved.items())
    added = any(bool(held[name][used & ~present[name]].any()) for name, used in saved.items())
    if now < sum(nonzero.values()) and not added:
        raise StateError(
            "the weights in these masks are zero, as sparsify() sets them: load the states of model and"
            " optimiser after sparsify(), then this one"
        )


def _mask(name: str, bits: Any, weight: Tensor, limits: tuple[int, int], layout: DensityLayout) -> Tensor:
    n = weight.numel()
    if not isinstance(bits, Tensor) or bits.dtype is not torch.uint8 or bits.shape != ((n + 7) // 8,):
        raise StateError(
            f"the mask of {name} must be torch.uint8 ({(n + 7) // 8},), got {_kind(bits)}: saved for another"
            " model, or damaged"
        )
    used = kernels.unpack_bits(bits.cpu(), 1, n).bool()
    least, most = limits
    if not least <= (count := int(used.sum())) <= most:
        raise StateError(
            f"the mask of {name} must have {least} to {most} of {n} entries in use, got {count}: the state is"
            " damaged"
        )
    if layout == "2:4" and int(used.view(-1, 4).sum(1).min()) < 2:
        raise StateError(f"the mask of {name} has fewer than two of four in use: the state is damaged")
    return used.view(weight.shape).to(weight.device)


def _score(name: str, score: Any, weight: Tensor) -> Tensor:
    if not isinstance(score, Tensor) or score.dtype is not torch.float32 or score.shape != weight.shape:
        raise StateError(
            f"the score of {name} must be torch.float32 {tuple(weight.shape)}, got {_kind(score)}: damaged"
        )
    return score.to(weight.device, copy=True)


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
