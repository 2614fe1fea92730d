"""Every method and reducer, among 2 ranks on the stand-in device, trains as on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor

from laconic import kernels
from tests.device.worlds import CPU, GPU, trained
from tests.laws.table import compressors, same


@pytest.fixture(autouse=True)
def reference() -> Iterator[None]:
    with kernels.using("reference"):
        yield


@pytest.mark.parametrize("spec", compressors())
def test_training_is_that_of_the_cpu(spec: str) -> None:
    for rank, (found, expected) in enumerate(zip(trained(spec, GPU), trained(spec, CPU), strict=True)):
        assert found.keys() == expected.keys()
        elsewhere = [key for key, value in found.items() if on_host(value)]
        assert not elsewhere, f"rank {rank}: on the host"
        differing = [key for key, value in found.items() if not same(value.cpu(), expected[key])]
        assert not differing, f"rank {rank}"


def on_host(value: Tensor) -> bool:
    """Whether a state is on the host that belongs on the device: memory in use, but no counter."""
    return value.device != GPU and value.numel() > 1 and bool(value.any())
