"""Index codings by name: `indices.golomb()` is the coding that the spec string makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laconic.core.lazy import name_makers

if TYPE_CHECKING:
    from laconic.codecs.indices.delta import Delta as delta
    from laconic.codecs.indices.fine_delta import FineDelta as fine_delta
    from laconic.codecs.indices.golomb import Golomb as golomb
    from laconic.codecs.indices.raw32 import Raw32 as raw32

__all__ = ["delta", "fine_delta", "golomb", "raw32"]

name_makers(__name__)
