"""The codec of kept activations beside SZ3, without prediction and with it, at the same error bounds.

    pip install '.[references]'
    python -m benchmarks.sz3    writes benchmarks/sz3/results.json: a minute

Inputs of six layers of a ResNet-20 after 30 steps on CIFAR-10, at four bounds as shares of the rms: how many
times smaller each makes them, whether zeros stay zeros, and SZ3's processor time, without prediction, over
ours in the same process, medians of five calls. Needs LACONIC_DATA.
"""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.activations.__main__ import BOUNDS, layer_inputs
from benchmarks.common.machine import machine
from laconic import kernels

RESULT = Path(__file__).with_name("results.json")
CALLS = 5


def main() -> None:
    """Measure, and write the file."""
    rows = [compared(name, x, share) for name, x in layer_inputs().items() for share in BOUNDS]
    about = {"machine": machine(), "pysz": importlib.metadata.version("pysz")}
    RESULT.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def compared(name: str, x: Tensor, share: float) -> dict[str, Any]:
    """One input at one bound."""
    from pysz import sz, szAlgorithm, szConfig, szErrorBoundMode

    eb = share * float(x.square().mean().sqrt())
    values = x.numpy()

    def theirs(algorithm: int = szAlgorithm.NOPRED) -> Any:
        config = szConfig()
        config.errorBoundMode, config.absErrorBound = szErrorBoundMode.ABS, eb
        config.cmprAlgo = algorithm
        return sz.compress(values, config)[0]

    zeros = values == 0

    def zeros_kept(decoded: Any) -> float | None:
        return float((decoded[zeros] == 0).mean()) if zeros.any() else None

    wire, packed = kernels.error_bound_encode(x, eb), theirs()
    predicted = theirs(szAlgorithm.INTERP_LORENZO)  # its default
    decoded, guessed = (sz.decompress(each, np.float32, values.shape)[0] for each in (packed, predicted))
    row = {
        "input": name,
        "bound": share,
        "ours": 4 * x.numel() / wire.numel(),
        "sz3": 4 * x.numel() / len(packed),
        "zeros": float(zeros.mean()),
        "zeros_kept": zeros_kept(kernels.error_bound_decode(wire, x.numel()).numpy()),
        "sz3_zeros_kept": zeros_kept(decoded),
        "sz3_predicting": 4 * x.numel() / len(predicted),
        "sz3_predicting_zeros_kept": zeros_kept(guessed),
        "sz3_error": float(np.abs(decoded - values).max()) / eb,
        "encode_times": seconds(theirs) / seconds(lambda: kernels.error_bound_encode(x, eb)),
        "decode_times": seconds(lambda: sz.decompress(packed, np.float32, values.shape))
        / seconds(lambda: kernels.error_bound_decode(wire, x.numel())),
    }
    print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    return row


def seconds(work: Callable[[], object]) -> float:
    """Median processor time of a call."""
    found = []
    for _ in range(CALLS):
        began = time.thread_time()
        work()
        found.append(time.thread_time() - began)
    return statistics.median(found)


if __name__ == "__main__":
    main()
