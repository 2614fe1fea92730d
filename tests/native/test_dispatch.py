"""Which implementation is live: the widest that runs, the reference where nothing was compiled."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch

from laconic import kernels
from laconic.core.layout import Segments
from laconic.kernels import dispatch
from tests.cases import over

WITHOUT = """
import sys
sys.modules["laconic._native"] = None
import torch
from laconic import kernels
from laconic.core.layout import Segments
x = torch.arange(-50.0, 50.0)
indices, counts = kernels.topk(x, Segments.whole(100), torch.tensor([3]))
print(kernels.info()["live"], kernels.runnable(), indices.tolist(), bool(kernels.info()["missing"]))
"""


def test_without_native_code_the_reference_serves() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "reference ('reference',) [0, 1, 99] True"


def test_the_widest_is_live() -> None:
    live, runnable = kernels.info()["live"], kernels.runnable()
    assert runnable[0] == "reference"
    assert live == ("reference" if len(runnable) == 1 else f"native-{runnable[-1]}")


@over(name=kernels.runnable())
def test_using_holds_for_its_block_only(name: str) -> None:
    before = kernels.info()["live"]
    with kernels.using(name):
        assert kernels.info()["live"].removeprefix("native-") == name
    assert kernels.info()["live"] == before
    with pytest.raises(RuntimeError, match="inside"), kernels.using(name):
        raise RuntimeError("inside")
    assert kernels.info()["live"] == before


def test_an_unknown_implementation_is_named() -> None:
    with (
        pytest.raises(ValueError, match="kernels 'sse9' cannot run here: choose one of reference"),
        kernels.using("sse9"),
    ):
        raise AssertionError


@pytest.mark.skipif(kernels.runnable() == ("reference",), reason="nothing was compiled here")
def test_native_code_refuses_other_tensors() -> None:
    """The cast checks again what Python has checked: dtype, contiguity, and that it is a tensor at all."""
    native = dispatch.native(torch.ones(1))
    assert native is not None
    whole = Segments.whole(2)
    good = torch.ones(2)
    for bad in (good.double(), torch.ones(2, 4)[:, 0], torch.ones(2, device="meta"), [1.0, 2.0], None):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            native.all_finite(bad, whole)
    assert native.all_finite(good, whole)


@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump (binutils) is not installed")
@pytest.mark.skipif("avx512" not in kernels.info()["compiled"], reason="no AVX-512 code was compiled here")
def test_wide_instructions_stay_in_their_namespace() -> None:
    """No inline function that all targets share was taken from an object that only newer CPUs can run."""
    from laconic import _native

    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", _native.__file__], capture_output=True, text=True
    )
    wide, symbol = set(), ""
    for line in listing.stdout.splitlines():
        if line.endswith(">:"):
            symbol = line.split("<", 1)[1][:-2]
        elif "%zmm" in line or "%ymm" in line:
            wide.add(symbol)
    assert any("laconic6avx512" in symbol for symbol in wide)
    assert not {symbol for symbol in wide if "avx" not in symbol}
