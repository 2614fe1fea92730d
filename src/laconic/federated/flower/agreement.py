"""What a reply says beside its arrays, checked before a strategy takes a mean of it.

Flower's strategies end the run where one reply of many has no metrics, or other ones than the rest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import MetricRecord, RecordDict

from laconic.federated.message import Refused

MOST_EXAMPLES = 2**53  # that float64 counts one by one; sums of such weights are finite
Signature = tuple[tuple[str, int], ...]  # names of metrics, and how many values: -1 for one that is no list


def metrics_of(content: RecordDict, weighted_by: str | None) -> tuple[str, MetricRecord]:
    """The name of a reply's one MetricRecord, and the record.

    Raises:
        Refused: There is another number of them, a value is not finite, or the weight is not above 0, or more
            than `MOST_EXAMPLES`.
    """
    records = list(content.metric_records.items())
    if len(records) != 1:
        raise Refused("malformed", f"one MetricRecord is expected, got {len(records)}")
    name, metrics = records[0]
    for key, value in metrics.items():
        if not all(math.isfinite(each) for each in (value if isinstance(value, list) else [value])):
            raise Refused("not finite", f"metric {key[:80]!r} is {str(value)[:80]}")
    if weighted_by is not None:
        weight = metrics.get(weighted_by)
        if isinstance(weight, list) or weight is None or not weight > 0:
            raise Refused(
                "malformed", f"metric {weighted_by!r}, the weight, must be above 0, got {weight!s:.80}"
            )
        if weight > MOST_EXAMPLES:
            raise Refused(
                "too large", f"metric {weighted_by!r}, the weight, must be at most 2^53, got {weight!s:.80}"
            )
    return name, metrics


def signature(name: str, metrics: Mapping[str, Any]) -> tuple[str, Signature]:
    """What must be the same in all replies."""
    lengths = {key: len(value) if isinstance(value, list) else -1 for key, value in metrics.items()}
    return name, tuple(sorted(lengths.items()))


def usual(signatures: Sequence[tuple[str, Signature]]) -> tuple[str, Signature] | None:
    """What most replies say; of several equally common ones the first."""
    return Counter(signatures).most_common(1)[0][0] if signatures else None
