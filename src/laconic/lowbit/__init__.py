"""Simulated low-bit training: layers that round activations, weights and gradients, and `convert`."""

from laconic.lowbit.add import Add as Add
from laconic.lowbit.add import QuantAdd as QuantAdd
from laconic.lowbit.convert import convert as convert
from laconic.lowbit.evonorm import EvoNormS0 as EvoNormS0
from laconic.lowbit.evonorm import RangeEvoNorm as RangeEvoNorm
from laconic.lowbit.grid import Precision as Precision
from laconic.lowbit.layers import QuantConv2d as QuantConv2d
from laconic.lowbit.layers import QuantLinear as QuantLinear
from laconic.lowbit.range_norm import RangeGroupNorm as RangeGroupNorm
from laconic.lowbit.range_norm import RangeNorm as RangeNorm

__all__ = [
    "Add",
    "EvoNormS0",
    "Precision",
    "QuantAdd",
    "QuantConv2d",
    "QuantLinear",
    "RangeEvoNorm",
    "RangeGroupNorm",
    "RangeNorm",
    "convert",
]
