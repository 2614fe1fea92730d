"""How many bits weights, activations and gradients have, and the rounding of one layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import Tensor

from laconic.core import arguments
from laconic.core.errors import StateError
from laconic.core.turn import mix, name_key
from laconic.lowbit.levels import integers, logarithmic, top
from laconic.lowbit.log_gradient import rounded_back
from laconic.lowbit.repeats import Repeats, repeated

Scale = Literal["linear", "log"]


@dataclass(frozen=True)
class FewBits:
    """Bits of a layer. None: float32.

    Args:
        weights: 1 to 8.
        activations: 1 to 8: those of the layer's input.
        gradients: 3 to 8: those of the layer's output.
        scale: The levels of weights and activations: "linear" or "log", as `levels` has them.
        stochastic: Whether activations are rounded at random in training.
        seed: Of all random rounding.

    Raises:
        SpecError: An argument is out of range, or random rounding is to be logarithmic.
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
            arguments.choice("scale", self.scale, ("linear",), "only linear levels are rounded at random")

    def at(self, name: str) -> FewBits:
        """The same bits with the random bits of the layer of this name."""
        return replace(self, seed=mix(self.seed, name_key(name)))

    @property
    def divisor(self) -> int:
        """What the product of integers is divided by: L of the weights times L of the activations."""
        if self.scale == "log":
            return 1
        return top(self.weights) * (1 if self.activations is None else top(self.activations))


class Rounding:
    """The rounding of one layer. `turns` counts its calls in training that draw random bits, which depend on
    it and the seed; those that activation checkpointing repeats do not count.
    """

    def __init__(self, bits: FewBits) -> None:
        self.bits = bits
        self.turns = 0
        self._turn = 0  # of the present call
        self._repeats = Repeats()

    def begin(self, training: bool, *inputs: Tensor) -> None:
        """A call of the layer begins. One that activation checkpointing repeats does not count."""
        if training and (self.bits.stochastic or self.bits.gradients is not None):
            again = repeated(training)
            self.turns += not again
            self._turn = self._repeats.turn(self.turns, again, *inputs)

    def weight(self, w: Tensor) -> Tensor:
        """Levels of a weight: integers, or powers of two if the scale is "log"."""
        if self.bits.scale == "log":
            return logarithmic(w, self.bits.weights)
        return integers(w, self.bits.weights)

    def activation(self, x: Tensor, training: bool, name: str = "activation") -> Tensor:
        """Levels of an input, or the input itself where it is real."""
        if self.bits.activations is None:
            return x
        if self.bits.scale == "log":
            return logarithmic(x, self.bits.activations)
        key = self._key(name) if self.bits.stochastic and training else None
        return integers(x, self.bits.activations, key)

    def scaled(self, product: Tensor) -> Tensor:
        """A product of levels as a product of numbers in [-1, 1]."""
        return product if self.bits.divisor == 1 else product * (1 / self.bits.divisor)

    def back(self, y: Tensor, training: bool, name: str = "gradient") -> Tensor:
        """y unchanged; its gradient in few bits, if it has them."""
        if self.bits.gradients is None or not training:
            return y
        return rounded_back(y, self.bits.gradients, self._key(name))

    def _key(self, name: str) -> int:
        return mix(self.bits.seed, self._turn, name_key(name))

    def state_dict(self) -> dict[str, Any]:
        """The count that random rounding depends on, and the bits and the seed that it is of."""
        return {"turns": self.turns, "bits": repr(self.bits)}

    def check(self, state: Any) -> None:
        """Raise `StateError` unless it is a state of a layer with these bits and this seed."""
        shown = arguments.shown(state)
        if not isinstance(state, dict) or {*state} - {"bits"} != {"turns"}:
            raise StateError(f"a layer's state is {{'turns': int, 'bits': str}}, got {shown}")
        if type(state["turns"]) is not int or state["turns"] < 0:
            raise StateError(f"turns must be a whole number of 0 or more, got {shown}")
        if state.get("bits", repr(self.bits)) != repr(self.bits):  # earlier versions did not say
            raise StateError(f"saved with {state['bits']}, and here are {self.bits!r}: convert alike")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.turns = state["turns"]

    def __str__(self) -> str:
        bits = self.bits
        shown = {"weights": bits.weights, "activations": bits.activations, "gradients": bits.gradients}
        return ", ".join(f"{name}={count or 'real'}" for name, count in shown.items())
