"""The tensors that candidates compress, and which candidates send nearly all of them at once."""

from __future__ import annotations

from laconic.core.layout import Entry, Layout
from laconic.reducers import Reducer

WHOLE = 0.5  # omega at most of a candidate that sends nearly all of x: what is left behind must bleed out


def is_matrix(entry: Entry) -> bool:
    return len(entry.shape) > 1


def sends_all(candidate: Reducer, matrices: Layout) -> bool:
    """Whether it sends nearly all of x at once, and not the rest later, as sparse ones do."""
    codec = candidate.feedback_codec()
    if codec is None:
        return not candidate.needs_feedback
    return max((codec.omega(entry.numel) for entry in matrices), default=0.0) <= WHOLE
