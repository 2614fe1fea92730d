"""SWAT: compute with the largest weights, and save the largest inputs for backward.

Raihan and Aamodt 2020, arXiv:2001.01969. Equations: `layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from torch import nn
from torch.optim import Optimizer

from laconic.core import arguments
from laconic.core.errors import AttachError, StateError
from laconic.core.inference import outside_inference_mode
from laconic.core.spec import Status
from laconic.sparsity.densities import densities
from laconic.sparsity.layers import SwatConv2d, SwatLinear
from laconic.sparsity.thresholds import Thresholds
from laconic.transforms.fast_path import FastPathOff
from laconic.transforms.selection import Layers, named_modules, replace_layers
from laconic.transforms.transform import DEFAULT_RUN, Option, Run, StoredInputs, Transform, TransformHandle

LAYERS: dict[type, Callable[[Any, Thresholds], SwatConv2d | SwatLinear]] = {
    nn.Conv2d: SwatConv2d.of,
    nn.Linear: SwatLinear.of,
}
First = Literal["dense", "sparse"]
FIRSTS: tuple[First, ...] = ("dense", "sparse")
DensityLayout = Literal["uniform", "erk"]
LAYOUTS: tuple[DensityLayout, ...] = ("uniform", "erk")


@dataclass(frozen=True, repr=False)
class SwatTraining(Transform):
    """Configuration with the arguments of `laconic.sparsity.swat`.

    >>> SwatTraining(sparsity=0.8)
    swat(sparsity=0.8)
    """

    paper: ClassVar[str] = "Raihan and Aamodt 2020, arXiv:2001.01969"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "AamirRaihan/SWAT"
    examples: ClassVar[tuple[str, ...]] = ("swat(sparsity=0.9)",)
    option: ClassVar[Option] = "sparsity"

    sparsity: float = 0.9
    refresh: int = 10
    first: First = "dense"
    layout: DensityLayout = "uniform"
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        arguments.number("sparsity", self.sparsity, above=0, below=1)
        arguments.whole("refresh", self.refresh, 1)
        arguments.choice("first", self.first, FIRSTS)
        arguments.choice("layout", self.layout, LAYOUTS)
        arguments.names("keep", self.keep, "head")

    def attach(self, model: nn.Module, optimizer: Optimizer | None = None, run: Run = DEFAULT_RUN) -> Swat:
        return _attach(model, self, self.keep)


def swat(
    model: nn.Module,
    sparsity: float = 0.9,
    refresh: int = 10,
    first: First = "dense",
    *,
    layout: DensityLayout = "uniform",
    keep: Collection[str] = (),
) -> Swat:
    """Train Conv2d and Linear layers with sparse weights and sparse saved inputs.

    Changes the model in place. Parameters remain the same dense objects, so optimisers,
    DistributedDataParallel, `laconic.compress` and `state_dict` work as before. Evaluate with the sparse
    layers.

    Products are dense: it saves no time, and memory only where no other layer saves the same input, not after
    a ReLU or before a BatchNorm. Each call of a layer in training counts as a batch: do not combine it with
    activation checkpointing.

    Args:
        model: Its layers are replaced.
        sparsity: Fraction of weights and saved inputs to drop, in (0, 1).
        refresh: Training batches between new thresholds.
        first: "dense" leaves the first of these layers unchanged.
        layout: "uniform" or "erk": narrow layers are denser, some unchanged.
        keep: Modules that stay dense, with children.

    Raises:
        SpecError: An argument is out of range.
        AttachError: The model is unchanged. It has SWAT layers, no layers to replace, or one with hooks, a
            shared weight or padding that is not a number of zeros; `keep` names no module.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 10))
    >>> handle = swat(net, sparsity=0.9)
    >>> [type(layer).__name__ for layer in net]
    ['Conv2d', 'ReLU', 'Flatten', 'SwatLinear']
    """
    return _attach(model, SwatTraining(sparsity, refresh, first, layout), keep)


@outside_inference_mode("state_dict", "load_state_dict", "remove")
class Swat(TransformHandle):
    """Handle of `laconic.sparsity.swat`. `layers`: the sparse layers by name."""

    def __init__(self, model: nn.Module, pairs: dict[str, tuple[nn.Module, SwatConv2d | SwatLinear]]) -> None:
        self.model = model
        self._dense = {name: dense for name, (dense, _) in pairs.items()}
        self.layers = {name: sparse for name, (_, sparse) in pairs.items()}
        replace_layers(model, self.layers)
        self._fast_path = FastPathOff(model, self.layers.values())

    @property
    def densities(self) -> dict[str, float]:
        """Fraction of weights used at a refresh, by layer."""
        return {name: layer.thresholds.density for name, layer in self.layers.items()}

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(f"{name}.weight" for name in self.layers)

    def stats(self) -> StoredInputs:
        return StoredInputs(self.kept_bytes(), self.dense_bytes())

    def figures(self) -> dict[str, Any]:
        return asdict(self.stats())

    def kept_bytes(self) -> int:
        """Return the bytes of inputs saved by the last batch with a backward pass."""
        return sum(layer.thresholds.kept_bytes for layer in self.layers.values())

    def dense_bytes(self) -> int:
        """Return the bytes that dense layers would have saved."""
        return sum(layer.thresholds.dense_bytes for layer in self.layers.values())

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return this rank's thresholds and batch counts, by layer."""
        return {name: layer.thresholds.state_dict() for name, layer in self.layers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state bit for bit. Raise `StateError`, unchanged, for any other."""
        if not isinstance(state, Mapping) or state.keys() != self.layers.keys():
            other = sorted(map(str, state.keys() ^ self.layers.keys())) if isinstance(state, Mapping) else []
            raise StateError(
                f"saved for other sparse layers ({', '.join(other[:3])} differ): use the same arguments"
            )
        for name, layer in self.layers.items():
            layer.thresholds.check(state[name])
        for name, layer in self.layers.items():
            layer.thresholds.load_state_dict(state[name])

    def remove(self) -> None:
        """Make the layers dense again. A second call does nothing."""
        self._fast_path.remove()
        replace_layers(self.model, self._dense)
        self.layers = {}


def _attach(model: nn.Module, spec: SwatTraining, keep: Collection[str]) -> Swat:
    selected = _select(model, spec.first, keep)
    weights = {name: tuple(layer.weight.shape) for name, layer in selected.items()}
    shares = densities(weights, round(1 - spec.sparsity, 12), spec.layout)
    made = {
        name: _sparse_layer(name, layer, Thresholds(shares[name], spec.refresh))
        for name, layer in selected.items()
        if shares[name] < 1
    }
    if not made:
        raise AttachError(
            f"layout {spec.layout!r} leaves every layer dense at sparsity {spec.sparsity}: use a higher one"
        )
    return Swat(model, {name: (selected[name], layer) for name, layer in made.items()})


def _select(model: nn.Module, first: First, keep: Collection[str]) -> dict[str, nn.Conv2d | nn.Linear]:
    layers = Layers.of(named_modules(model), LAYERS, keep, replaced=True)
    layers.refuse_parametrised(layers.found)
    plain = [name for name, layer in layers.found.items() if type(layer) in LAYERS]
    selected = layers.outside_keep(plain[1 if first == "dense" else 0 :])
    if not selected:
        raise AttachError(
            f"no layer to sparsify: of {len(layers.found)} Conv2d and Linear layers, first={first!r} and"
            " keep= leave none; use first='sparse' or more layers"
        )
    layers.refuse_unreplaceable(selected, "sparse form")
    layers.refuse_shared(selected, "one threshold cannot serve both")
    return selected


def _sparse_layer(name: str, layer: Any, thresholds: Thresholds) -> SwatConv2d | SwatLinear:
    try:
        return LAYERS[type(layer)](layer, thresholds)
    except AttachError as error:
        raise AttachError(f"{name!r}: {error}") from None
