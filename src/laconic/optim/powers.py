"""Nearest power of two by logarithm: AP2(x) = sign(x) 2^round(log2 |x|).

Courbariaux et al. 2016, arXiv:1602.02830, as in the authors' code.
"""

from __future__ import annotations

import torch
from torch import Tensor


def nearest_power(x: Tensor) -> Tensor:
    """Return AP2(x), with |AP2(x) - x| < 0.42 |x|; 0, NaN and Inf stay.

    >>> nearest_power(torch.tensor([3.0, -0.3, 0.0, 1.4]))
    tensor([ 4.0000, -0.2500,  0.0000,  1.0000])
    """
    return torch.where((x == 0) | ~x.isfinite(), x, x.sign() * x.abs().log2().round().exp2())
