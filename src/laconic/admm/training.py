"""Block-wise training: what `laconic train --with` takes where a model's blocks train side by side."""

from __future__ import annotations

from laconic.core.spec import Spec


class BlockTraining(Spec):
    """Base of `block_admm(...)`. It is no method of `laconic.compress`: no gradient crosses a block."""
