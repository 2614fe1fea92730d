"""Every codec makes, and reads, the bytes that it once made."""

from __future__ import annotations

import pytest
import torch

from laconic import kernels
from laconic.core.codec import Codec
from laconic.core.spec import parse

from ..laws.table import LIVE, specs
from .make import KEY, digest, golden_input, made_now, stored

STORED = stored()


def test_every_codec_has_stored_wires() -> None:
    missing = set(specs(Codec)) - set(STORED)
    assert not missing, (
        f"run `python -m tests.golden.make` and commit wires.json: {sorted(missing)} have none"
    )


@pytest.mark.parametrize("live", LIVE)
@pytest.mark.parametrize("spec", STORED)
def test_the_wire_is_as_it_was(spec: str, live: str) -> None:
    with kernels.using(live):
        for n, once in STORED[spec].items():
            assert made_now(spec, int(n)) == once, n


@pytest.mark.parametrize("live", LIVE)
@pytest.mark.parametrize("spec", STORED)
def test_stored_bytes_decode_to_what_they_meant(spec: str, live: str) -> None:
    """From the bytes in the file, not from a wire made now."""
    read = 0
    with kernels.using(live):
        for n, once in STORED[spec].items():
            if not once["wire"].startswith("sha256:"):
                wire = torch.tensor(list(bytes.fromhex(once["wire"])), dtype=torch.uint8)
                assert digest(parse(spec).decode(wire, int(n))) == once["decoded"], n
                read += 1
    assert read >= 3


def test_the_input_is_what_it_was() -> None:
    assert digest(golden_input(4)) == "ca69cbbedcbf993dd5fb223ddbef423f" and KEY == 0x5EED
