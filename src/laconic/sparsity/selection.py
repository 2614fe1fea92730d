"""Selection of the weights to mask: all matrices of these layers.

Linear, Conv1d, Conv2d, Conv3d, Embedding     weight
RNN, LSTM, GRU and their cells                weight_ih, weight_hh and weight_hr of each layer and direction
MultiheadAttention                            in_proj_weight or its three parts; out_proj.weight
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from laconic.core.errors import AttachError
from laconic.sparsity import fours
from laconic.sparsity.densities import DensityLayout
from laconic.transforms.selection import Layers, named_modules

DENSE = (nn.Linear, NonDynamicallyQuantizableLinear)  # MultiheadAttention's out_proj
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)
CELLS = (nn.RNNCell, nn.LSTMCell, nn.GRUCell)
LAYERS = (*DENSE, *CONVOLUTIONS, *RECURRENT, *CELLS, nn.MultiheadAttention, nn.Embedding)
KIND_NAMES = "Linear, convolution, recurrent, attention or Embedding layer"
PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def masked_weights(model: nn.Module, keep: Collection[str], layout: DensityLayout) -> dict[str, nn.Parameter]:
    """Return the weights to mask, by name, in the model's order.

    `layout`: "uniform" leaves the first layer dense, "2:4" weights whose row length is no multiple of four.
    Raises `AttachError` if no weight is left, one is transformed, shared or sharded, or an embedding has
    sparse gradients.
    """
    modules = {name.replace("_orig_mod.", ""): module for name, module in named_modules(model).items()}
    layers = Layers.of(modules, LAYERS, keep)
    layers.refuse_parametrised(layers.found)
    found = [
        name
        for name, module in layers.found.items()
        if type(module) in LAYERS and any(part.requires_grad for _, part in weights_of(module))
    ]
    chosen = found
    if layout == "uniform":  # also without its parts, such as out_proj of attention
        chosen = [name for name in found[1:] if not name.startswith(f"{found[0]}.")]
    fit = {
        (name, key): weight
        for name, module in layers.outside_keep(chosen).items()
        for key, weight in weights_of(module)
        if weight.requires_grad and (layout != "2:4" or fours.divisible(weight))
    }
    if not fit:
        raise AttachError(f"no layer to sparsify: {_why_none(len(found), keep, layout)}")
    for (name, key), weight in fit.items():
        kind = type(weight.data).__name__
        if weight.is_complex() or kind == "DTensor":
            raise AttachError(
                f"the {key} of {name!r} is {weight.dtype}, {kind}: masks need real weights that are not"
                " sharded, in a plain model or under DistributedDataParallel"
            )
        if isinstance(modules[name], nn.Embedding) and modules[name].sparse:
            raise AttachError(
                f"{name!r} has sparse gradients, which have no entries for a mask to add: build it with"
                f" sparse=False, or keep it dense with keep=({name!r},)"
            )
    names = {name for name, _ in fit}
    layers.refuse_shared(names, "one mask cannot serve both", keys={key for _, key in fit})
    return {f"{name}.{key}" if name else key: weight for (name, key), weight in fit.items()}


def weights_of(layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    if isinstance(layer, nn.RNNBase):
        keys = [key for key in layer._flat_weights_names if key.startswith("weight")]
    elif isinstance(layer, nn.RNNCellBase):
        keys = ["weight_ih", "weight_hh"]
    else:
        keys = [*PROJECTIONS] if isinstance(layer, nn.MultiheadAttention) else ["weight"]
    for key in keys:
        weight = layer._parameters.get(key)
        if weight is not None and weight.numel():
            yield key, weight


def _why_none(found: int, keep: Collection[str], layout: DensityLayout) -> str:
    if not found:
        return f"this model has no {KIND_NAMES} with a weight to train"
    left = f" outside keep={tuple(keep)!r}" if keep else ""
    if layout == "erk":
        return f"this model has {found} layers with weights to train, but none{left}"
    if layout == "2:4":
        return (
            f"none of {found} layers has a row length that is a multiple of four, as layout='2:4' needs"
            f"{left}: use layout='erk'"
        )
    return (
        f"layout='uniform' leaves the first of {found} layers dense, and no other is left{left}: use"
        " layout='erk'"
    )
