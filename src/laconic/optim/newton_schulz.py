"""Newton-Schulz iteration: sets a matrix's singular values to about 1.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; as in `torch.optim.Muon`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def orthonormal(x: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Return x (m, n) orthonormalised, in bfloat16; zeros for zeros.

    Singular values end between about 0.5 and 1.5. Each step is X = a X + b (X X^T) X + c (X X^T)^2 X; `eps`
    is the smallest norm to divide by.

    >>> orthonormal(torch.diag(torch.tensor([1.0, 2.0])), (1.5, -0.5, 0.0), 9, 1e-7).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    now = x.T.to(torch.bfloat16) if tall else x.to(torch.bfloat16)
    now = now / now.norm().clamp(min=eps)
    for _ in range(steps):
        gram = now @ now.T
        now = torch.addmm(now, torch.addmm(gram, gram, gram, beta=b, alpha=c), now, beta=a)
    return now.T if tall else now
