"""What `laconic train --lowbit` leaves behind: a packed model that the library reads back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from laconic.lowbit import load_packed, load_tables
from laconic.tasks.few_bits import PACKED, FewBits, lowbit_attached


def build() -> nn.Sequential:
    torch.manual_seed(0)
    norms = nn.BatchNorm1d(32), nn.BatchNorm1d(32)
    return nn.Sequential(nn.Linear(16, 32), norms[0], nn.Linear(32, 32), norms[1], nn.Linear(32, 4))


@pytest.mark.parametrize(
    ("spec", "load"),
    [
        ("binarise(norm='shift')", lambda path: load_packed(path, build())),
        ("quantise()", lambda path: load_packed(path, build())),
        ("admm()", lambda path: load_tables(build().eval(), torch.load(path, weights_only=True))),
    ],
)
def test_a_training_leaves_a_packed_model_that_loads(spec, load, tmp_path: Path) -> None:
    model, x = build(), torch.randn(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    companion = FewBits(model, lowbit_attached(spec, model, optimizer))
    model(x).square().mean().backward()
    optimizer.step()
    (event,) = companion.finish(tmp_path, rank=0)
    assert "times smaller" in event["message"]
    with torch.no_grad():
        assert torch.equal(load(tmp_path / PACKED)(x), model.eval()(x))
