"""Optimisers for compressed gradients: each an ordinary `torch.optim.Optimizer`."""

from laconic.optim.amsgrad import AMSGrad as AMSGrad
from laconic.optim.qcmd_adagrad import QCMDAdaGrad as QCMDAdaGrad
from laconic.optim.qrda_adagrad import QRDAAdaGrad as QRDAAdaGrad

__all__ = ["AMSGrad", "QCMDAdaGrad", "QRDAAdaGrad"]
