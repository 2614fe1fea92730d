"""The loops, one meaning each: `reference.py` (plain torch, any device) and `cpu.cc` (native, the same bits).

Callers write `from laconic import kernels`; `dispatch` says which implementation is live. Buffers are flat
float32 (n,), ranges of them are `Segments`; starts, sizes, counts and ks are CPU int64 (s,).
"""

from laconic.kernels.accumulate import accumulate_ as accumulate_
from laconic.kernels.accumulate import all_finite as all_finite
from laconic.kernels.accumulate import velocity_ as velocity_
from laconic.kernels.bitpack import pack_bits as pack_bits
from laconic.kernels.bitpack import pack_ternary as pack_ternary
from laconic.kernels.bitpack import packed_nbytes as packed_nbytes
from laconic.kernels.bitpack import ternary_nbytes as ternary_nbytes
from laconic.kernels.bitpack import unpack_bits as unpack_bits
from laconic.kernels.bitpack import unpack_ternary as unpack_ternary
from laconic.kernels.codebook import codebook_nbytes as codebook_nbytes
from laconic.kernels.codebook import hierarchy_add_ as hierarchy_add_
from laconic.kernels.codebook import hierarchy_encode as hierarchy_encode
from laconic.kernels.codebook import powers_add_ as powers_add_
from laconic.kernels.codebook import powers_encode as powers_encode
from laconic.kernels.codebook import quantile_add_ as quantile_add_
from laconic.kernels.codebook import quantile_encode as quantile_encode
from laconic.kernels.dispatch import info as info
from laconic.kernels.dispatch import runnable as runnable
from laconic.kernels.dispatch import using as using
from laconic.kernels.entropy import ascending as ascending
from laconic.kernels.entropy import delta_decode as delta_decode
from laconic.kernels.entropy import delta_encode as delta_encode
from laconic.kernels.entropy import rice_bound as rice_bound
from laconic.kernels.entropy import rice_decode as rice_decode
from laconic.kernels.entropy import rice_encode as rice_encode
from laconic.kernels.natural import natural_add_ as natural_add_
from laconic.kernels.natural import natural_encode as natural_encode
from laconic.kernels.natural import natural_nbytes as natural_nbytes
from laconic.kernels.philox import dither24 as dither24
from laconic.kernels.philox import philox as philox
from laconic.kernels.philox import uniform as uniform
from laconic.kernels.quantise import dequantise_add_ as dequantise_add_
from laconic.kernels.quantise import levels_add_ as levels_add_
from laconic.kernels.quantise import moments as moments
from laconic.kernels.quantise import norms as norms
from laconic.kernels.quantise import quantise as quantise
from laconic.kernels.quantise import quantise_levels as quantise_levels
from laconic.kernels.quantise import quantised_nbytes as quantised_nbytes
from laconic.kernels.scatter import gather as gather
from laconic.kernels.scatter import scatter_add_ as scatter_add_
from laconic.kernels.scatter import scatter_zero_ as scatter_zero_
from laconic.kernels.select import above as above
from laconic.kernels.select import random_indices as random_indices
from laconic.kernels.select import sampled_topk as sampled_topk
from laconic.kernels.select import topk as topk
from laconic.kernels.sign import sign_add_ as sign_add_
from laconic.kernels.sign import sign_encode as sign_encode
from laconic.kernels.sign import sign_nbytes as sign_nbytes
from laconic.kernels.sign import signed_add_ as signed_add_
from laconic.kernels.sign import signs as signs
from laconic.kernels.tally import packed_levels_add_ as packed_levels_add_
from laconic.kernels.tally import packed_sum as packed_sum
from laconic.kernels.units import units_bound as units_bound
from laconic.kernels.units import units_decode as units_decode
from laconic.kernels.units import units_encode as units_encode
from laconic.kernels.vote import majority as majority
