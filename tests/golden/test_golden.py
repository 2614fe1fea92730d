"""Every codec makes, and reads, the bytes that it once made: in this version and in every released one."""

from __future__ import annotations

import hashlib

import torch

from laconic import kernels
from laconic.core.codec import Codec
from laconic.core.spec import parse
from tests.cases import over

from ..laws.table import specs
from .make import FILES, KEY, VERSION, digest, golden_input, made_now, stored

# SHA-256 of the file of each released version: a release enters its own here, and nothing changes it again.
RELEASED: dict[str, str] = {}
STORED = {version: stored(path) for version, path in FILES.items()}
WIRES = [(version, spec) for version, wires in STORED.items() for spec in wires]


def test_every_codec_has_stored_wires() -> None:
    missing = set(specs(Codec)) - {spec for _, spec in WIRES}
    assert not missing, f"run `python -m tests.golden.make` and commit its file: {sorted(missing)} have none"


def test_files_of_released_versions_are_as_they_were() -> None:
    assert FILES.keys() - RELEASED.keys() <= {VERSION}, "a file is neither released nor this version's"
    for version, sha256 in RELEASED.items():
        assert hashlib.sha256(FILES[version].read_bytes()).hexdigest() == sha256, version


def test_a_wire_is_stored_once() -> None:
    """The bytes of a spec never change: a later version has no second opinion of them."""
    stored_specs = [spec for _, spec in WIRES]
    assert len(stored_specs) == len(set(stored_specs))


@over(wires=WIRES, target=("reference", kernels.runnable()[-1]))
def test_wires_and_their_values_are_as_they_were(wires: tuple[str, str], target: str) -> None:
    """Values come from the bytes in the file, not from a wire made now."""
    (version, spec), read = wires, 0
    with kernels.using(target):
        for n, once in STORED[version][spec].items():
            assert made_now(spec, int(n)) == once, n
            if not once["wire"].startswith("sha256:"):
                wire = torch.tensor(list(bytes.fromhex(once["wire"])), dtype=torch.uint8)
                assert digest(parse(spec).decode(wire, int(n))) == once["decoded"], n
                read += 1
    assert read >= 3


def test_the_input_is_what_it_was() -> None:
    assert digest(golden_input(4)) == "ca69cbbedcbf993dd5fb223ddbef423f" and KEY == 0x5EED
