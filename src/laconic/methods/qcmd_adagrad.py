"""QCMD AdaGrad: quantised gradients for AdaGrad with composite mirror descent, which makes sparse models.

Xu et al. 2022, arXiv:2208.05631, from the abstract: the quantiser is our reconstruction, the update is
derived from Duchi et al. 2011 [recalled].
"""

from __future__ import annotations

from typing import Any

from laconic.codecs.threshold_ternary import ThresholdTernary
from laconic.exchange.method import Method, governed_by, method
from laconic.optim.qcmd_adagrad import QCMDAdaGrad

TERNARY = ThresholdTernary()
ADAGRAD = QCMDAdaGrad.requirement()


@method(
    paper="Xu et al. 2022, arXiv:2208.05631",
    sends="gradients cut off below a threshold and sent as -1, 0, 1 times the mean of the others",
    status="reconstruction",
)
def qcmd_adagrad(compressor: Any = TERNARY) -> Method:
    """g = mean of Q(g_i), for `laconic.optim.QCMDAdaGrad`.

    Q compresses matrices without feedback, as in the paper; one-dimensional tensors are summed uncompressed.
    The optimiser's `zero_share()` returns the model's sparsity. Payload: that of `compressor`, 1.6 bits per
    entry by default.

    Args:
        compressor: Q, any codec, by default threshold_ternary(). `dense()` is the exact mean.

    Raises:
        SpecError: `compressor` is something else.

    >>> qcmd_adagrad()
    qcmd_adagrad()
    """
    return governed_by(ADAGRAD, compressor)
