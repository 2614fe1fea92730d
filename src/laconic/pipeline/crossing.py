"""Spec of the data between pipeline stages, for `--with` and `--stages`.

| spec | activations | their gradients |
|---|---|---|
| `dense()` | float32, by torch's own stages | float32 |
| `direct(dense(), dense())` | float32, by Laconic's: over gloo, receives first | float32 |
| `ac_sgd(forward=4, backward=8)` | changes, in 4 bits | in 8 bits |
| `direct(minmax(bits=4))` | in 4 bits | in 8 bits |
| `change(minmax(bits=4))` | changes, by its codec | in 8 bits |
| a codec or selector, `cast('fp16')` | in it | in it |
"""

from __future__ import annotations

from dataclasses import dataclass

from laconic.codecs.dense import Dense
from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.selector import Selector
from laconic.core.spec import parse
from laconic.exchange.method import lift_codec
from laconic.pipeline.coding import PipelineCoding
from laconic.pipeline.codings.ac_sgd import AcSgd
from laconic.pipeline.codings.change import Change
from laconic.pipeline.codings.direct import EIGHT, Direct


@dataclass(frozen=True)
class Crossing:
    """Parsed spec. `spec`: its canonical text."""

    spec: str
    forward: Codec | Change
    backward: Codec

    @property
    def dense(self) -> bool:
        return self.spec == repr(Dense())

    @property
    def remembers(self) -> bool:
        return isinstance(self.forward, Change)


def crossing(text: str) -> Crossing:
    """Parse a spec. Raises `SpecError` for other kinds.

    >>> crossing("ac_sgd(2, 6)").forward, crossing("cast('fp16')").backward
    (change(minmax(bits=2, block=128)), cast(dtype='fp16'))
    """
    found = parse(text)
    if isinstance(found, AcSgd | Direct):
        return Crossing(repr(found), found.forward_coding, found.backward_coding)
    if isinstance(found, Codec | Selector):
        codec = lift_codec(found)
        return Crossing(repr(found), codec, codec)
    if isinstance(found, Change):
        return Crossing(repr(found), found, EIGHT)
    raise SpecError(
        f"{text} is for workers that each hold the whole model: with --stages give a boundary coding, such as"
        " ac_sgd(forward=4, backward=8), a codec or dense(), and pass methods for weight gradients to"
        " --replicas-with"
    )


def for_stages(text: str) -> bool:
    try:
        return isinstance(parse(text), PipelineCoding)
    except SpecError:
        return False
