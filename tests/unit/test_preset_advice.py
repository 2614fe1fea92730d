"""Presets that lose accuracy in short trainings say at attachment what to change."""

from __future__ import annotations

import logging

from tests.unit.shared import for_each

from laconic.comm.loopback import Loopback
from laconic.exchange.method import lift
from laconic.exchange.steps_needed import log_steps_needed

from .strategy_world import worker


def test_diloco_logs_what_to_change(caplog):
    with caplog.at_level(logging.INFO, "laconic"):
        Loopback.run(2, lambda comm: worker("diloco(every=4)", comm) and None)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("diloco(every=4): ranks train alone")
    assert "twice its steps, or set a smaller every=" in said


@for_each(
    "spec, said",
    [
        ("dgc(density=0.01)", "once in 100 steps: a training run of fewer than about 4000 steps"),
        ("topk(density=0.05)", "once in 20 steps: a training run of fewer than about 800 steps"),
        ("cgx()", ""),
        ("auto()", ""),
        ("dense()", ""),
    ],
)
def test_a_sparse_method_logs_how_many_steps_it_needs(spec, said):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    log = logging.getLogger("laconic")
    before = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        log_steps_needed(lift(spec))
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    assert [said in record.getMessage() for record in records] == ([True] if said else [])
