"""Bits and rounding of one layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import Tensor

from laconic.core import arguments
from laconic.core.errors import StateError
from laconic.core.turn import mix, name_key
from laconic.lowbit import log_gradient
from laconic.lowbit.levels import integers, logarithmic, top
from laconic.lowbit.recomputation import RecomputedCalls, is_recomputed

Scale = Literal["linear", "log"]


@dataclass(frozen=True)
class FewBits:
    """Bits of a layer: 1 to 8 for weights and inputs, 3 to 8 for the output's gradients. None: float32.

    `scale`: see `levels`. `stochastic`: rounds inputs at random in training.
    """

    weights: int = 1
    activations: int | None = 1
    gradients: int | None = None
    scale: Scale = "linear"
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        arguments.whole("weights", self.weights, 1, 8)
        if self.activations is not None:
            arguments.whole("activations", self.activations, 1, 8)
        if self.gradients is not None:
            arguments.whole("gradients", self.gradients, 3, 8)
        arguments.choice("scale", self.scale, get_args(Scale))
        arguments.flag("stochastic", self.stochastic)
        arguments.whole("seed", self.seed, most=(1 << 64) - 1)
        if self.stochastic:
            arguments.choice("scale", self.scale, ("linear",), "stochastic=True needs linear levels")

    def at(self, name: str) -> FewBits:
        return replace(self, seed=mix(self.seed, name_key(name)))

    @property
    def divisor(self) -> int:
        """Product of the levels L of weights and activations."""
        if self.scale == "log":
            return 1
        return top(self.weights) * (1 if self.activations is None else top(self.activations))


class Rounding:
    """Rounding of one layer. Random bits depend on the seed and `turns`: training calls, without repetitions
    by activation checkpointing.
    """

    def __init__(self, bits: FewBits) -> None:
        self.bits = bits
        self.turns = 0
        self._turn = 0
        self._repeats = RecomputedCalls()

    def begin(self, training: bool, *inputs: Tensor) -> None:
        if training and (self.bits.stochastic or self.bits.gradients is not None):
            again = is_recomputed(training)
            self.turns += not again
            self._turn = self._repeats.turn(self.turns, again, *inputs)

    def weight(self, w: Tensor) -> Tensor:
        if self.bits.scale == "log":
            return logarithmic(w, self.bits.weights)
        return integers(w, self.bits.weights)

    def activation(self, x: Tensor, training: bool, name: str = "activation") -> Tensor:
        if self.bits.activations is None:
            return x
        if self.bits.scale == "log":
            return logarithmic(x, self.bits.activations)
        key = self._key(name) if self.bits.stochastic and training else None
        return integers(x, self.bits.activations, key)

    def rescale(self, product: Tensor) -> Tensor:
        return product if self.bits.divisor == 1 else product * (1 / self.bits.divisor)

    def round_gradient(self, y: Tensor, training: bool, name: str = "gradient") -> Tensor:
        if self.bits.gradients is None or not training:
            return y
        return log_gradient.round_gradient(y, self.bits.gradients, self._key(name))

    def _key(self, name: str) -> int:
        return mix(self.bits.seed, self._turn, name_key(name))

    def state_dict(self) -> dict[str, Any]:
        return {"turns": self.turns, "bits": repr(self.bits)}

    def check(self, state: Any) -> None:
        shown = arguments.shown(state)
        if not isinstance(state, dict) or {*state} - {"bits"} != {"turns"}:
            raise StateError(f"a layer's state must be {{'turns': int, 'bits': str}}, got {shown}")
        if type(state["turns"]) is not int or state["turns"] < 0:
            raise StateError(f"turns must be a whole number of 0 or more, got {shown}")
        if state.get("bits", repr(self.bits)) != repr(self.bits):  # earlier versions have no "bits"
            raise StateError(
                f"saved with {state['bits']}, but the layer has {self.bits!r}: use the same arguments"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.turns = state["turns"]

    def __str__(self) -> str:
        bits = self.bits
        shown = {"weights": bits.weights, "activations": bits.activations, "gradients": bits.gradients}
        return ", ".join(f"{name}={count or 'real'}" for name, count in shown.items())
