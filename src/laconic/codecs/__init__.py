"""Codecs: a flat float32 tensor to bytes and back; one file or package per codec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laconic.core.lazy import name_makers

if TYPE_CHECKING:
    from laconic.codecs.adaptive_hierarchy import AdaptiveHierarchy as adaptive_hierarchy
    from laconic.codecs.cast import Cast as cast
    from laconic.codecs.centroids import Centroids as centroids
    from laconic.codecs.cutoff import Cutoff as cutoff
    from laconic.codecs.dct import DCT as dct
    from laconic.codecs.dense import Dense as dense
    from laconic.codecs.hierarchy import Hierarchy as hierarchy
    from laconic.codecs.logquant import Logquant as logquant
    from laconic.codecs.minmax import MinMax as minmax
    from laconic.codecs.minmax_sketch import MinmaxSketch as minmax_sketch
    from laconic.codecs.natural import Natural as natural
    from laconic.codecs.natural_dithering import NaturalDithering as natural_dithering
    from laconic.codecs.nuqsgd import NUQSGD as nuqsgd
    from laconic.codecs.qsgd import QSGD as qsgd
    from laconic.codecs.quantile import Quantile as quantile
    from laconic.codecs.rotated import Rotated as rotated
    from laconic.codecs.sign import Sign as sign
    from laconic.codecs.signmean import SignMean as signmean
    from laconic.codecs.sparse import Sparse as sparse
    from laconic.codecs.ternary import Ternary as ternary
    from laconic.codecs.threshold_ternary import ThresholdTernary as threshold_ternary

__all__ = [
    "adaptive_hierarchy",
    "cast",
    "centroids",
    "cutoff",
    "dct",
    "dense",
    "hierarchy",
    "logquant",
    "minmax",
    "minmax_sketch",
    "natural",
    "natural_dithering",
    "nuqsgd",
    "qsgd",
    "quantile",
    "rotated",
    "sign",
    "signmean",
    "sparse",
    "ternary",
    "threshold_ternary",
]

name_makers(__name__)
