"""The native extension: one submodule a target, with the functions of `Target`. Absent without a compiler."""

from typing import Protocol

from torch import Tensor

compiled: list[str]
features: list[str]

class Target(Protocol):
    # accumulate
    def all_finite(self, x: Tensor, starts: Tensor, sizes: Tensor, /) -> bool: ...
    def accumulate_(
        self, residual: Tensor, grad: Tensor, starts: Tensor, sizes: Tensor, scale: float, decay: float, /
    ) -> bool: ...
    def velocity_(
        self,
        velocity: Tensor,
        residual: Tensor,
        grad: Tensor,
        starts: Tensor,
        sizes: Tensor,
        momentum: Tensor,
        scale: float,
        nesterov: bool,
        /,
    ) -> bool: ...
    def add_sparse_(self, x: Tensor, y: Tensor, alpha: float, /) -> None: ...
    # philox
    def philox(self, out: Tensor, key: int, offset: int, /) -> None: ...
    def uniform(self, out: Tensor, key: int, offset: int, /) -> None: ...
    def dither24(self, out: Tensor, key: int, offset: int, /) -> None: ...
    # quantise
    def quantise(
        self,
        x: Tensor,
        starts: Tensor,
        sizes: Tensor,
        keys: Tensor,
        levels: int,
        bucket: int,
        powers: bool,
        base3: bool,
        norm: int,
        clip: float,
        scales: Tensor,
        floors: Tensor,
        wire: Tensor,
        /,
    ) -> int: ...
    def quantise_levels(
        self,
        x: Tensor,
        starts: Tensor,
        sizes: Tensor,
        keys: Tensor,
        levels: int,
        bucket: int,
        powers: bool,
        norm: int,
        clip: float,
        scales: Tensor,
        floors: Tensor,
        made: Tensor,
        signed: Tensor,
        /,
    ) -> int: ...
    def dequantise_add_(
        self,
        wire: Tensor,
        starts: Tensor,
        sizes: Tensor,
        out: Tensor,
        alpha: float,
        levels: int,
        bucket: int,
        powers: bool,
        base3: bool,
        /,
    ) -> None: ...
    def levels_add_(
        self,
        signed: Tensor,
        scales: Tensor,
        starts: Tensor,
        sizes: Tensor,
        out: Tensor,
        alpha: float,
        levels: int,
        bucket: int,
        powers: bool,
        /,
    ) -> None: ...
    def norms(
        self,
        x: Tensor,
        starts: Tensor,
        sizes: Tensor,
        bucket: int,
        norm: int,
        clip: float,
        out: Tensor,
        /,
    ) -> None: ...
    # minmax
    def minmax_encode(
        self,
        x: Tensor,
        starts: Tensor,
        sizes: Tensor,
        keys: Tensor,
        widths: Tensor,
        bucket: int,
        stochastic: bool,
        wire: Tensor,
        /,
    ) -> int: ...
    def minmax_add_(
        self,
        wire: Tensor,
        starts: Tensor,
        sizes: Tensor,
        widths: Tensor,
        bucket: int,
        out: Tensor,
        alpha: float,
        /,
    ) -> None: ...
    # scatter
    def gather(
        self, x: Tensor, starts: Tensor, sizes: Tensor, indices: Tensor, counts: Tensor, out: Tensor, /
    ) -> None: ...
    def scatter_add_(
        self,
        out: Tensor,
        starts: Tensor,
        sizes: Tensor,
        indices: Tensor,
        counts: Tensor,
        values: Tensor,
        alpha: float,
        /,
    ) -> None: ...
    def scatter_zero_(
        self, out: Tensor, starts: Tensor, sizes: Tensor, indices: Tensor, counts: Tensor, /
    ) -> None: ...
    # select
    def topk(
        self, x: Tensor, starts: Tensor, sizes: Tensor, ks: Tensor, indices: Tensor, counts: Tensor, /
    ) -> int: ...
    def sampled_topk(
        self,
        x: Tensor,
        starts: Tensor,
        sizes: Tensor,
        ks: Tensor,
        strides: Tensor,
        samples: Tensor,
        ranks: Tensor,
        keys: Tensor,
        lower: float,
        rounds: int,
        indices: Tensor,
        counts: Tensor,
        /,
    ) -> int: ...
    def above(
        self, x: Tensor, starts: Tensor, sizes: Tensor, threshold: Tensor, indices: Tensor, counts: Tensor, /
    ) -> int: ...
    def random_indices(
        self, sizes: Tensor, ks: Tensor, keys: Tensor, indices: Tensor, counts: Tensor, /
    ) -> None: ...
    # bitpack
    def pack_bits(self, codes: Tensor, bits: int, wire: Tensor, /) -> None: ...
    def unpack_bits(self, wire: Tensor, bits: int, codes: Tensor, /) -> None: ...
    def pack_ternary(self, levels: Tensor, wire: Tensor, /) -> bool: ...
    def unpack_ternary(self, wire: Tensor, levels: Tensor, /) -> None: ...
    # sign
    def sign_encode(self, x: Tensor, starts: Tensor, sizes: Tensor, block: int, wire: Tensor, /) -> bool: ...
    def sign_add_(
        self, wire: Tensor, starts: Tensor, sizes: Tensor, block: int, out: Tensor, alpha: float, /
    ) -> None: ...
    def signs(self, x: Tensor, starts: Tensor, sizes: Tensor, signs: Tensor, means: Tensor, /) -> None: ...
    def signed_add_(
        self, signs: Tensor, values: Tensor, starts: Tensor, sizes: Tensor, out: Tensor, alpha: float, /
    ) -> None: ...
    def zeros(self, x: Tensor, starts: Tensor, sizes: Tensor, bits: Tensor, /) -> None: ...
    # natural
    def natural_encode(
        self, x: Tensor, starts: Tensor, sizes: Tensor, keys: Tensor, bits: int, wire: Tensor, /
    ) -> bool: ...
    def natural_add_(
        self, wire: Tensor, starts: Tensor, sizes: Tensor, bits: int, out: Tensor, alpha: float, /
    ) -> None: ...
    # tally
    def packed_sum(
        self, wires: Tensor, ranks: int, n: int, bits: int, most: int, sum_bits: int, sums: Tensor, /
    ) -> int: ...
    def packed_levels_add_(
        self,
        wire: Tensor,
        scales: Tensor,
        starts: Tensor,
        sizes: Tensor,
        out: Tensor,
        alpha: float,
        bits: int,
        levels: int,
        zero: int,
        bucket: int,
        /,
    ) -> bool: ...
    # vote
    def majority(self, votes: Tensor, voters: int, ties: Tensor, winners: Tensor, /) -> None: ...
    # entropy
    def ascending(self, indices: Tensor, counts: Tensor, sizes: Tensor, /) -> bool: ...
    def rice_most(self, counts: Tensor, sizes: Tensor, /) -> int: ...
    def rice_encode(self, indices: Tensor, counts: Tensor, sizes: Tensor, wire: Tensor, /) -> int: ...
    def rice_decode(self, wire: Tensor, counts: Tensor, sizes: Tensor, indices: Tensor, /) -> None: ...
    def delta_encode(self, indices: Tensor, counts: Tensor, sizes: Tensor, wire: Tensor, /) -> int: ...
    def delta_decode(self, wire: Tensor, counts: Tensor, sizes: Tensor, indices: Tensor, /) -> None: ...
    # codebook
    def hierarchy_encode(
        self, x: Tensor, starts: Tensor, sizes: Tensor, levels: int, wire: Tensor, /
    ) -> bool: ...
    def hierarchy_add_(
        self, wire: Tensor, starts: Tensor, sizes: Tensor, levels: int, out: Tensor, alpha: float, /
    ) -> None: ...
    def quantile_encode(
        self, x: Tensor, starts: Tensor, sizes: Tensor, bins: int, wire: Tensor, /
    ) -> bool: ...
    def quantile_add_(
        self, wire: Tensor, starts: Tensor, sizes: Tensor, bins: int, out: Tensor, alpha: float, /
    ) -> None: ...
    def powers_encode(
        self, x: Tensor, starts: Tensor, sizes: Tensor, bounds: Tensor, wire: Tensor, /
    ) -> bool: ...
    def powers_add_(
        self, wire: Tensor, starts: Tensor, sizes: Tensor, powers: Tensor, out: Tensor, alpha: float, /
    ) -> None: ...
    # elias
    def elias_bits(self, values: Tensor, /) -> int: ...
    def elias_encode(self, values: Tensor, wire: Tensor, /) -> None: ...
    def elias_decode(self, wire: Tensor, values: Tensor, /) -> None: ...
    # levels
    def nonzero_counts(self, levels: Tensor, sizes: Tensor, counts: Tensor, /) -> None: ...
    def split_levels(
        self, levels: Tensor, sizes: Tensor, indices: Tensor, magnitudes: Tensor, signs: Tensor, /
    ) -> None: ...
    def join_levels(
        self,
        indices: Tensor,
        counts: Tensor,
        sizes: Tensor,
        magnitudes: Tensor,
        signs: Tensor,
        most: int,
        levels: Tensor,
        /,
    ) -> bool: ...
    def places_of(self, steps: Tensor, counts: Tensor, places: Tensor, sums: Tensor, /) -> None: ...
    def steps_of(self, places: Tensor, counts: Tensor, steps: Tensor, /) -> None: ...
    # units
    def units_encode(self, indices: Tensor, counts: Tensor, sizes: Tensor, wire: Tensor, /) -> int: ...
    def units_decode(self, wire: Tensor, counts: Tensor, sizes: Tensor, indices: Tensor, /) -> None: ...
    # lowrank
    def lowrank_times(
        self, x: Tensor, starts: Tensor, rows: Tensor, cols: Tensor, rank: int, right: Tensor, left: Tensor, /
    ) -> None: ...
    def lowrank_transposed_times(
        self, x: Tensor, starts: Tensor, rows: Tensor, cols: Tensor, rank: int, left: Tensor, right: Tensor, /
    ) -> None: ...
    def lowrank_product_add_(
        self,
        x: Tensor,
        starts: Tensor,
        rows: Tensor,
        cols: Tensor,
        rank: int,
        left: Tensor,
        right: Tensor,
        alpha: float,
        /,
    ) -> None: ...
    def lowrank_orthonormal_(self, packed: Tensor, rank: int, lengths: Tensor, /) -> None: ...

portable: Target
avx2: Target
avx512: Target
