"""Distributed deep learning in few words."""

from laconic.core.codec import Codec as Codec
from laconic.core.spec import parse as parse

__all__ = ["Codec", "parse"]
