"""Sparse training: layers that compute with a few of their weights and keep a few of their inputs."""

from laconic.sparsity.layers import SwatConv2d as SwatConv2d
from laconic.sparsity.layers import SwatLinear as SwatLinear
from laconic.sparsity.swat import Swat as Swat
from laconic.sparsity.swat import swat as swat

__all__ = ["Swat", "SwatConv2d", "SwatLinear", "swat"]
