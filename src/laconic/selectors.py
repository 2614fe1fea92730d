"""Selectors by name: `selectors.topk(density=0.01)` is the selector that the spec string makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laconic.core.lazy import name_makers

if TYPE_CHECKING:
    from laconic.codecs.selectors.above_share import AboveShare as above_share
    from laconic.codecs.selectors.chunked_topk import ChunkedTopK as chunked_topk
    from laconic.codecs.selectors.density_schedule import DensitySchedule as density_schedule
    from laconic.codecs.selectors.randomk import RandomK as randomk
    from laconic.codecs.selectors.sampled_topk import SampledTopK as sampled_topk
    from laconic.codecs.selectors.threshold import Threshold as threshold
    from laconic.codecs.selectors.topk import TopK as topk

__all__ = ["above_share", "chunked_topk", "density_schedule", "randomk", "sampled_topk", "threshold", "topk"]

name_makers(__name__)
