"""Few-bit form of each kind of layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from laconic.lowbit.few_bit_layers import FewBitConv2d, FewBitLinear
from laconic.lowbit.few_bit_recurrent import FewBitGRU, FewBitGRUCell, FewBitLSTM, FewBitLSTMCell

KINDS: dict[type, Any] = {
    nn.Linear: FewBitLinear,
    nn.Conv2d: FewBitConv2d,
    nn.LSTM: FewBitLSTM,
    nn.GRU: FewBitGRU,
    nn.LSTMCell: FewBitLSTMCell,
    nn.GRUCell: FewBitGRUCell,
}
KIND_NAMES = "Linear, Conv2d, LSTM, GRU, LSTMCell and GRUCell"
FEW_BIT_LAYERS = tuple(KINDS.values())
