"""Optimisers for compressed gradients, large batches and few bits; master weights for any optimiser."""

from laconic.optim.amsgrad import AMSGrad as AMSGrad
from laconic.optim.lamb import LAMB as LAMB
from laconic.optim.lars import LARS as LARS
from laconic.optim.master_weights import master_weights as master_weights
from laconic.optim.qcmd_adagrad import QCMDAdaGrad as QCMDAdaGrad
from laconic.optim.qrda_adagrad import QRDAAdaGrad as QRDAAdaGrad
from laconic.optim.shift_adamax import ShiftAdaMax as ShiftAdaMax

__all__ = ["LAMB", "LARS", "AMSGrad", "QCMDAdaGrad", "QRDAAdaGrad", "ShiftAdaMax", "master_weights"]
