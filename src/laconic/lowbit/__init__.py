"""Training with few bits: `convert` (2 to 8), `binarise` (1), `quantise` (1 to 8), and `pack`."""

from laconic.lowbit.add import Add as Add
from laconic.lowbit.add import QuantAdd as QuantAdd
from laconic.lowbit.binarise import binarise as binarise
from laconic.lowbit.convert import convert as convert
from laconic.lowbit.evonorm import EvoNormS0 as EvoNormS0
from laconic.lowbit.evonorm import RangeEvoNorm as RangeEvoNorm
from laconic.lowbit.few_bit_handle import FewBitHandle as FewBitHandle
from laconic.lowbit.few_bit_layers import FewBitConv2d as FewBitConv2d
from laconic.lowbit.few_bit_layers import FewBitLinear as FewBitLinear
from laconic.lowbit.few_bit_recurrent import FewBitGRU as FewBitGRU
from laconic.lowbit.few_bit_recurrent import FewBitGRUCell as FewBitGRUCell
from laconic.lowbit.few_bit_recurrent import FewBitLSTM as FewBitLSTM
from laconic.lowbit.few_bit_recurrent import FewBitLSTMCell as FewBitLSTMCell
from laconic.lowbit.grid import Precision as Precision
from laconic.lowbit.layers import QuantConv2d as QuantConv2d
from laconic.lowbit.layers import QuantLinear as QuantLinear
from laconic.lowbit.pack import load_packed as load_packed
from laconic.lowbit.pack import pack as pack
from laconic.lowbit.pack import save_packed as save_packed
from laconic.lowbit.packed_layers import PackedConv2d as PackedConv2d
from laconic.lowbit.packed_layers import PackedLinear as PackedLinear
from laconic.lowbit.packed_recurrent import PackedGRU as PackedGRU
from laconic.lowbit.packed_recurrent import PackedGRUCell as PackedGRUCell
from laconic.lowbit.packed_recurrent import PackedLSTM as PackedLSTM
from laconic.lowbit.packed_recurrent import PackedLSTMCell as PackedLSTMCell
from laconic.lowbit.quantise import quantise as quantise
from laconic.lowbit.range_norm import RangeGroupNorm as RangeGroupNorm
from laconic.lowbit.range_norm import RangeNorm as RangeNorm
from laconic.lowbit.shift_norm import ShiftBatchNorm as ShiftBatchNorm
from laconic.lowbit.tables import Admm as Admm
from laconic.lowbit.tables import StraightThrough as StraightThrough
from laconic.lowbit.tables import admm as admm
from laconic.lowbit.tables import load_tables as load_tables
from laconic.lowbit.tables import straight_through as straight_through

__all__ = [
    "Add",
    "Admm",
    "EvoNormS0",
    "FewBitConv2d",
    "FewBitGRU",
    "FewBitGRUCell",
    "FewBitHandle",
    "FewBitLSTM",
    "FewBitLSTMCell",
    "FewBitLinear",
    "PackedConv2d",
    "PackedGRU",
    "PackedGRUCell",
    "PackedLSTM",
    "PackedLSTMCell",
    "PackedLinear",
    "Precision",
    "QuantAdd",
    "QuantConv2d",
    "QuantLinear",
    "RangeEvoNorm",
    "RangeGroupNorm",
    "RangeNorm",
    "ShiftBatchNorm",
    "StraightThrough",
    "admm",
    "binarise",
    "convert",
    "load_packed",
    "load_tables",
    "pack",
    "quantise",
    "save_packed",
    "straight_through",
]
