"""Room for old values of a memory, until it is known whether the step counts.

In float32 (r + g) - g is not r, so a skipped step can only be undone with the old values. The kernels leave
them in the gradient's own buffer, if that is free until its mean is written at the end of the step, else in a
copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.core.layout import Layout


def copied(x: Tensor, layout: Layout) -> Tensor:
    """Return a copy of these tensors of float32 x (n,), at the same places; other entries are undefined.

    >>> copied(torch.ones(2), Layout.of([("a", (2,))]))
    tensor([1., 1.])
    """
    copy, runs = torch.empty_like(x), layout.segments.merged
    if runs.numel:
        torch._foreach_copy_(runs.views(copy), runs.views(x))
    return copy
