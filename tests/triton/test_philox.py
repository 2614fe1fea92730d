"""Random bits in Triton: the bits of the reference, from any offset, of any number of keys."""

from __future__ import annotations

import pytest
import torch

from laconic.kernels.philox import gpu, reference

from .offline import TARGETS, Kernel, check

CPU = torch.device("cpu")
KEYS = (0, 1, 2**32 + 5, 2**63 + 9, 2**64 - 1)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 61, 4096, 2**34 - 70, 2**40 + 3])
@pytest.mark.parametrize("n", [0, 1, 7, 4095, 4097, 9001])
def test_streams_equal_the_reference(key: int, offset: int, n: int) -> None:
    assert torch.equal(gpu.uniform(key, n, CPU, offset), reference.uniform(key, n, offset))
    assert torch.equal(gpu.dithers24([key], [n], CPU, offset), reference.dither24(key, n, offset))


def test_the_dither_of_many_tensors_equals_the_reference() -> None:
    sizes = [0, 1, 7, 40, 511, 513, 4095, 4096, 4097, 65_537, 0, 3]
    keys = [2**64 - 1 - 2**33 * i for i in range(len(sizes))]
    assert torch.equal(gpu.dithers24(keys, sizes, CPU), reference.dithers24(keys, sizes))


DITHER = {"out_ptr": "*i32", "keys_ptr": "*i64", "table_ptr": "*i64", "tiles": "i32"}
UNIFORM = {"out_ptr": "*fp32", "key": "i64", "first": "i64", "lead": "i32", "n": "i64"}
KERNELS = [
    Kernel("dither", gpu.dither_kernel, DITHER, {}, ("out_ptr", "keys_ptr", "table_ptr"), wide=False),
    Kernel("uniform", gpu.uniform_kernel, UNIFORM, {}, ("out_ptr",), wide=False),
]


@pytest.mark.compiled
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_kernels_fit(kernel: Kernel, target: str) -> None:
    check(kernel, target)
