"""--precision: what cannot be is refused before anything starts."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from tests.unit.shared import for_each, refuses
from torch import nn
from typer.testing import CliRunner

from laconic.core.errors import SpecError
from laconic.strategies.distribute import strategy_or_method
from laconic.tools.cli import doctor
from laconic.tools.cli.main import app
from laconic.tools.tasks import find
from laconic.tools.tasks.precision import Precision, check_device, check_strategy, normal
from laconic.tools.tasks.task import Recipe

TEXT = {"train_x": torch.zeros(4, 64, dtype=torch.uint8), "train_y": torch.zeros(4, 64, dtype=torch.uint8)}


def test_an_unknown_precision_names_those_that_are():
    refuses(SpecError, "one of fp32, bf16, fp16, got 'fp8'", normal, "fp8")
    assert [normal(name) for name in ("fp32", None, "fp16")] == [None, None, "fp16"]


@for_each("spec, patience", [("adpsgd()", None), ("local_sgd()", 30.0)])
def test_ranks_that_do_not_wait_cannot_share_a_loss_scale(spec, patience):
    strategy = strategy_or_method(spec)
    refuses(SpecError, "--precision bf16", check_strategy, "fp16", strategy, patience)
    check_strategy("bf16", strategy, patience)
    check_strategy("fp16", strategy_or_method("dgc()"), patience)


def test_a_model_that_this_machine_cannot_train_in_float16_is_refused():
    """The LSTM of CPUs without float16 kernels, played by an error."""

    class Refuses(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 4)

        def forward(self, x):
            raise RuntimeError("could not create a primitive descriptor. Run with more")

    task = replace(find("shakespeare"), models={"lstm": Recipe(Refuses, lr=1.0)})
    refuses(
        SpecError,
        r"shakespeare's model lstm in it \(could not create a primitive desc",
        check_device,
        "fp16",
        task,
        "lstm",
        TEXT,
    )
    check_device(None, task, "lstm", TEXT)


def test_float16_alone_has_a_scaler_and_autocast_gives_its_dtype():
    half, whole = Precision("bf16"), Precision(None)
    assert half.scaler is None and whole.scaler is None and half.state_dict() == {}
    with half.autocast():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.bfloat16
    with whole.autocast():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32


def test_doctor_says_how_fast_16_bits_are_here(monkeypatch):
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    row = next(line for line in result.output.splitlines() if line.split()[:1] == ["precision"])
    for name in ("bf16", "fp16"):
        speeds = r"does not run|as fast as fp32|[\d.e+-]+ times (as fast as|slower than) fp32"
        assert re.search(rf"{name} ({speeds})", row)
    monkeypatch.setattr(doctor, "_product_s", lambda dtype: None if dtype == torch.float16 else 2.0)
    assert doctor._precisions() == ["bf16 as fast as fp32", "fp16 does not run"]
