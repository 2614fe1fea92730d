"""Store the wires of codecs that have none stored yet; never change those that are.

    python -m tests.golden.make                  adds what is missing to the present version's file
    python -m tests.golden.make --replace SPEC   a change of format that no version has been released with

Each version has a file of the wires that are new in it, and files of released versions are kept for ever as
they are: docs/wire_format.md has the promise. `wires-VERSION.json` maps spec and size to {"wire", "decoded"}:
bytes in hexadecimal, or their SHA-256 where there are more than 64. The input is made of Philox words and
exact float32 operations only, so that every machine and every version of torch makes the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from pathlib import Path

import torch
from torch import Tensor

from laconic import kernels
from laconic.core.codec import Codec
from laconic.core.spec import parse

from ..laws.table import specs

HERE = Path(__file__).parent
PROJECT = (HERE.parents[1] / "pyproject.toml").read_text()
VERSION = re.findall(r'^version = "(.+)"$', PROJECT, re.MULTILINE)[0]
FILES = {path.stem.removeprefix("wires-"): path for path in sorted(HERE.glob("wires-*.json"))}
PRESENT = HERE / f"wires-{VERSION}.json"
Wires = dict[str, dict[str, dict[str, str]]]  # spec -> size -> what was made
SIZES = (0, 1, 2, 7, 100, 1001)
KEY = 0x5EED


def golden_input(n: int) -> Tensor:
    """float32 (n,): cubes of uniform numbers in [-1, 1), many small ones and few large."""
    u = kernels.uniform(n, n) * 2 - 1
    return u * u * u


def digest(values: Tensor) -> str:
    """The bytes of a tensor in hexadecimal, or their hash where they are many."""
    data = bytes(values.view(torch.uint8).tolist()) if values.numel() else b""
    return data.hex() if len(data) <= 64 else f"sha256:{hashlib.sha256(data).hexdigest()}"


def made_now(spec: str, n: int) -> dict[str, str]:
    """What the present code makes of the golden input."""
    codec: Codec = parse(spec)
    wire = codec.encode(golden_input(n), key=KEY)
    return {"wire": digest(wire), "decoded": digest(codec.decode(wire, n))}


def stored(path: Path) -> Wires:
    """What a file holds; nothing where there is none yet."""
    wires: Wires = json.loads(path.read_text()) if path.exists() else {}
    return wires


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--replace", metavar="SPEC", action="append", default=[])
    replaced = [repr(parse(spec)) for spec in options.parse_args().replace]
    wires = stored(PRESENT)
    released = {spec for path in FILES.values() if path != PRESENT for spec in stored(path)}
    if fixed := released.intersection(replaced):
        raise SystemExit(f"{sorted(fixed)}: released with this format; give the new one a name of its own")
    for spec in specs(Codec):
        if spec not in wires.keys() | released or spec in replaced:
            wires[spec] = {str(n): made_now(spec, n) for n in SIZES}
            print("stored", spec)
    PRESENT.write_text(json.dumps(dict(sorted(wires.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
