"""Checks of a reply's metrics: Flower's strategies end the run if they differ between replies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import MetricRecord, RecordDict

from laconic.federated.message import Refused

MOST = 2**53  # float64 represents all integers up to here
Signature = tuple[tuple[str, int], ...]  # names of metrics and numbers of values; -1 for a scalar


def metrics_of(
    content: RecordDict, weighted_by: str | None, loss: str | None = None
) -> tuple[str, MetricRecord]:
    """Return the name of a reply's only MetricRecord, and the record.

    Raises `Refused` unless its values are finite, the weight is above 0, the loss at least 0, and both at
    most `MOST`.
    """
    records = list(content.metric_records.items())
    if len(records) != 1:
        raise Refused("malformed", f"one MetricRecord is expected, got {len(records)}")
    name, metrics = records[0]
    for key, value in metrics.items():
        if not all(math.isfinite(each) for each in (value if isinstance(value, list) else [value])):
            raise Refused("not finite", f"metric {key[:80]!r} is {str(value)[:80]}")
    for key, of, least in ((weighted_by, "the weight", "above 0"), (loss, "the loss", "0 or more")):
        if key is None:
            continue
        value = metrics.get(key)
        fits = (
            value is not None and not isinstance(value, list) and (value > 0 or (key == loss and value == 0))
        )
        if not fits:
            raise Refused("malformed", f"metric {key!r}, {of}, must be {least}, got {value!s:.80}")
        if value > MOST:
            raise Refused("too large", f"metric {key!r}, {of}, must be at most 2^53, got {value!s:.80}")
    return name, metrics


def signature(name: str, metrics: Mapping[str, Any]) -> tuple[str, Signature]:
    lengths = {key: len(value) if isinstance(value, list) else -1 for key, value in metrics.items()}
    return name, tuple(sorted(lengths.items()))


def usual(signatures: Sequence[tuple[str, Signature]]) -> tuple[str, Signature] | None:
    return Counter(signatures).most_common(1)[0][0] if signatures else None
