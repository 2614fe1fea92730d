"""Pipelines over slow links: compressed activations and gradients between the stages."""

from laconic.pipeline.coding import PipelineCoding as PipelineCoding
from laconic.pipeline.compress import compress as compress
from laconic.pipeline.handle import Handle as Handle
from laconic.pipeline.link import Link as Link
from laconic.pipeline.link import link as link
from laconic.pipeline.stats import Stats as Stats

__all__ = ["Handle", "Link", "PipelineCoding", "Stats", "compress", "link"]
