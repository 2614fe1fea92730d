"""Sparse training: models with few nonzero weights, or few stored inputs."""

from laconic.sparsity.exported import SparseConv2d as SparseConv2d
from laconic.sparsity.exported import SparseLinear as SparseLinear
from laconic.sparsity.exported import export as export
from laconic.sparsity.exported import nbytes as nbytes
from laconic.sparsity.flops import Flops as Flops
from laconic.sparsity.layers import SwatConv2d as SwatConv2d
from laconic.sparsity.layers import SwatLinear as SwatLinear
from laconic.sparsity.masked_average import MaskedAverage as MaskedAverage
from laconic.sparsity.rigl import rigl as rigl
from laconic.sparsity.sparse_training import SparseTraining as SparseTraining
from laconic.sparsity.sparsify import Sparsifier as Sparsifier
from laconic.sparsity.sparsify import sparsify as sparsify
from laconic.sparsity.swat import Swat as Swat
from laconic.sparsity.swat import swat as swat

__all__ = [
    "Flops",
    "MaskedAverage",
    "SparseConv2d",
    "SparseLinear",
    "SparseTraining",
    "Sparsifier",
    "Swat",
    "SwatConv2d",
    "SwatLinear",
    "export",
    "nbytes",
    "rigl",
    "sparsify",
    "swat",
]
