"""Every method and reducer, among 2 ranks on the stand-in device, trains as on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor

from laconic import kernels
from tests.device.worlds import CPU, GPU, trained
from tests.laws.table import compressors, first_of_each, same

# State that the host computes, and keeps there.
ON_HOST = {
    "autoencoder": "its code is a few hundred numbers, coded and learnt on the host",
    "borders": "cuts between ranks",
    "errors": "one number a tensor and number of bits",
    "since": "a few numbers a tensor, which the host counts",
    "threshold_controller": "one threshold",
}

# Methods that apply SGD's momentum: on the CPU a kernel adds what is not zero, without fused multiply-add.
ADDS_SPARSELY = ("dgc(", "signum(", "dhqc(")

# Methods whose products are those of the device's own library: its order of summation differs.
BY_LIBRARY = ("powersgd(",)


@pytest.fixture(autouse=True)
def reference() -> Iterator[None]:
    with kernels.using("reference"):
        yield


@pytest.mark.parametrize("spec", first_of_each(compressors()))
def test_training_is_that_of_the_cpu(spec: str) -> None:
    for rank, (found, expected) in enumerate(zip(trained(spec, GPU), trained(spec, CPU), strict=True)):
        assert found.keys() == expected.keys()
        elsewhere = [key for key, value in found.items() if on_host(value) and kind(key) not in ON_HOST]
        assert not elsewhere, f"rank {rank}: on the host: {elsewhere}"
        slack = 5e-7 if spec.startswith(ADDS_SPARSELY) else 0.0
        if spec.startswith(BY_LIBRARY):
            for key, value in found.items():
                close = 1e-5 * max(1.0, float(expected[key].abs().max()))
                assert bool(((value.cpu() - expected[key]).abs() <= close).all()), key
            continue
        differing = [key for key, value in found.items() if not alike(key, value.cpu(), expected[key], slack)]
        assert not differing, f"rank {rank}: differ: {differing}"


def on_host(value: Tensor) -> bool:
    """Whether a state is on the host that belongs on the device: memory in use, but no counter."""
    return value.device != GPU and value.numel() > 1 and bool(value.any())


def alike(key: str, found: Tensor, expected: Tensor, slack: float) -> bool:
    """Whether states have the same bits; parameters may differ by `slack`."""
    if slack and "/" not in key:
        return bool(((found - expected).abs() <= slack * expected.abs().clamp(min=1.0)).all())
    return same(found, expected)


def kind(key: str) -> str:
    """The kind of a memory, of a key such as "exchange/route0/once/borders/blocks".

    >>> kind("exchange/route0/once/borders/blocks")
    'borders'
    """
    return "/".join(key.split("/")[-2:-1])
