"""What the planner says crosses a boundary is what the network interfaces of two hosts count, within 1 %.

But for acknowledgements: a receiver that is late sends fewer of them than every second packet.
"""

from __future__ import annotations

import pytest
from benchmarks.pipeline.workloads import AC48, DENSE, WINDOW, WORKLOADS
from benchmarks.steps.__main__ import Ranks

from laconic.comm.wire_model import HEADERS, PREAMBLE
from laconic.pipeline.crossing import crossing
from laconic.tools.lab import Lab, missing
from laconic.tools.plan.boundary import PACKETS, rehearse_crossing
from tests.dist.pipelines import TESTED

ANNOUNCED = HEADERS + PREAMBLE  # bytes of a receiver that is ready


@pytest.mark.nightly
@TESTED
def test_the_forecast_of_bytes_equals_the_counters() -> None:
    if reason := missing():
        pytest.skip(reason)
    workload = WORKLOADS["fast"]
    micro = workload.micro_batches
    with Lab(2) as lab, Ranks(lab, "fast", "benchmarks.pipeline.rank") as ranks:
        for spec in (DENSE, AC48):
            visits = rehearse_crossing(crossing(spec), (workload.batch // micro, WINDOW, 384))
            ranks.over(
                "400mbit", do="build", spec=spec, stages=2, replicas=1, between="dense()", schedule="1f1b"
            )
            for visited in visits:
                counted = [each["sent"] for each in ranks.ask(do="steps", count=1)]
                most = visited.sent(micro)
                least = [micro * (PACKETS.forth(nbytes) + ANNOUNCED) for nbytes in (visited.up, visited.down)]
                for low, found, high in zip(least, counted, most, strict=True):
                    assert 0.99 * low <= found <= 1.01 * high, (spec, visited)
