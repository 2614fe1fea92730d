"""Presets that lose accuracy in short trainings say at attachment what to change."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.unit.shared import for_each

from laconic.comm.loopback import Loopback
from laconic.core.spec import parse
from laconic.exchange.method import lift
from laconic.exchange.steps_needed import log_steps_needed
from laconic.strategies.several import Several

from .strategy_world import worker


def steps(*kinds):
    optimizers = [kind([torch.nn.Parameter(torch.zeros(2))], lr=0.1) for kind in kinds]
    return optimizers[0] if len(optimizers) == 1 else Several(optimizers)


@pytest.mark.parametrize(
    ("spec", "inside", "momentum"),
    [
        ("diloco()", (torch.optim.SGD,), 0.5),
        ("diloco()", (torch.optim.SGD, torch.optim.SGD), 0.5),
        ("diloco()", (torch.optim.AdamW,), 0.9),
        ("diloco()", (torch.optim.SGD, torch.optim.AdamW), 0.9),
        ("diloco(momentum=0.9)", (torch.optim.SGD,), 0.9),
        ("diloco(momentum=0)", (torch.optim.AdamW,), 0),
    ],
)
def test_the_outer_momentum_of_diloco_suits_the_optimiser_inside(spec, inside, momentum):
    assert parse(spec).momentum_with(steps(*inside)) == momentum


def test_diloco_logs_its_outer_momentum_and_what_to_change(caplog):
    with caplog.at_level(logging.INFO, "laconic"):
        Loopback.run(2, lambda comm: worker("diloco(every=4)", comm) and None)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("diloco(every=4), outer momentum 0.5")
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
