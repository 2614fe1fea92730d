"""Pipeline coding: what a spec can say about the boundary between stages, beside a plain codec."""

from __future__ import annotations

from laconic.core.spec import Spec


class PipelineCoding(Spec):
    """Base of `change(...)`, one direction, and of methods such as `ac_sgd(...)`, both directions."""
