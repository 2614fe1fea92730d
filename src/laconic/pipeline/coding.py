"""Specs for the boundary between pipeline stages."""

from __future__ import annotations

from laconic.core.spec import Spec


class PipelineCoding(Spec):
    """Base of `change(...)` (one direction) and of methods such as `ac_sgd(...)` (both directions)."""
