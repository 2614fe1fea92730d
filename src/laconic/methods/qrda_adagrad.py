"""QRDA AdaGrad: quantised gradients for AdaGrad with regularised dual averaging.

Xu et al. 2022, arXiv:2208.05631, as for `qcmd_adagrad`.
"""

from __future__ import annotations

from typing import Any

from laconic.codecs.threshold_ternary import ThresholdTernary
from laconic.exchange.method import Method, governed_by, method
from laconic.optim.qrda_adagrad import QRDAAdaGrad

TERNARY = ThresholdTernary()
ADAGRAD = QRDAAdaGrad.requirement()


@method(
    paper="Xu et al. 2022, arXiv:2208.05631",
    sends="gradients cut off below a threshold and sent as -1, 0, 1 times the mean of the others",
    status="reconstruction",
)
def qrda_adagrad(compressor: Any = TERNARY) -> Method:
    """g = mean of Q(g_i), for `laconic.optim.QRDAAdaGrad`.

    Like `qcmd_adagrad`, with the other of the paper's two optimisers.

    Args:
        compressor: Q, any codec, by default threshold_ternary(). `dense()` is the exact mean.

    Raises:
        SpecError: `compressor` is something else.

    >>> qrda_adagrad()
    qrda_adagrad()
    """
    return governed_by(ADAGRAD, compressor)
