"""QCMD AdaGrad: quantised gradients into AdaGrad with composite mirror descent, which makes sparse models.

Xu et al. 2022, arXiv:2208.05631: only the abstract was at hand. The quantiser is our reconstruction, the
update is derived from Duchi et al. 2011 [recalled].
"""

from __future__ import annotations

from typing import Any

from laconic.codecs.cutoff import Cutoff
from laconic.optim.qcmd_adagrad import QCMDAdaGrad
from laconic.strategies.method import Method, governed_by, method

CUTOFF = Cutoff()
ADAGRAD = QCMDAdaGrad.asked_for()


@method(
    paper="Xu et al. 2022, arXiv:2208.05631",
    sends="gradients cut off below a threshold and rounded to -1, 0, 1 times a scale",
    status="reconstruction",
)
def qcmd_adagrad(what: Any = CUTOFF) -> Method:
    """g = mean of Q(g_i), which `laconic.optim.QCMDAdaGrad` takes.

    `what`: the quantiser Q, any codec; `dense()` is the exact mean. Matrices go by Q without feedback, as in
    the paper; tensors of one dimension are summed as they are. Payload: that of `what`, 2 bits an entry by
    default. The optimiser's `zero_share()` says how sparse the model is.

    >>> qcmd_adagrad()
    qcmd_adagrad()
    """
    return governed_by(ADAGRAD, what)
