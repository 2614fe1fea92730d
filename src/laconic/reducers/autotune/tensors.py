"""Tensors that candidates compress, and candidates that send nearly all of them."""

from __future__ import annotations

from laconic.core.layout import Entry, Layout
from laconic.reducers import Reducer

WHOLE = 0.5  # largest omega of a candidate that sends nearly all of x


def is_matrix(entry: Entry) -> bool:
    return len(entry.shape) > 1


def sends_all(candidate: Reducer, matrices: Layout) -> bool:
    codec = candidate.feedback_codec()
    if codec is None:
        return not candidate.needs_feedback
    return max((codec.omega(entry.numel) for entry in matrices), default=0.0) <= WHOLE
