"""QRDA AdaGrad: quantised gradients into AdaGrad with regularised dual averaging.

Xu et al. 2022, arXiv:2208.05631: only the abstract was at hand. The quantiser is our reconstruction, the
update is derived from Duchi et al. 2011 [recalled].
"""

from __future__ import annotations

from typing import Any

from laconic.codecs.cutoff import Cutoff
from laconic.optim.qrda_adagrad import QRDAAdaGrad
from laconic.strategies.method import Method, governed_by, method

CUTOFF = Cutoff()
ADAGRAD = QRDAAdaGrad.asked_for()


@method(
    paper="Xu et al. 2022, arXiv:2208.05631",
    sends="gradients cut off below a threshold and rounded to -1, 0, 1 times a scale",
    status="reconstruction",
)
def qrda_adagrad(what: Any = CUTOFF) -> Method:
    """g = mean of Q(g_i), which `laconic.optim.QRDAAdaGrad` takes.

    As `qcmd_adagrad`, with the other of the paper's two optimisers.

    >>> qrda_adagrad()
    qrda_adagrad()
    """
    return governed_by(ADAGRAD, what)
