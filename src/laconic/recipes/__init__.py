"""Recipes: tested combinations of settings, such as those for large batches."""

from laconic.recipes.accumulation import Accumulation as Accumulation
from laconic.recipes.copies import Copies as Copies
from laconic.recipes.large_batch import large_batch as large_batch

__all__ = ["Accumulation", "Copies", "large_batch"]
