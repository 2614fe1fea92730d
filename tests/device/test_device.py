"""The stand-in device itself: what it refuses, as CUDA does, and what it counts."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from tests.device import counting
from tests.device.worlds import GPU


def test_tensors_of_two_devices_do_not_mix() -> None:
    x = torch.ones(4, device=GPU)
    for mix in (
        lambda: x + torch.ones(4),
        lambda: torch.ones(4).add_(x),
        lambda: torch.cat([x, torch.ones(1)]),
        lambda: x.index_select(0, torch.tensor([1])),
        lambda: torch.rand(4, generator=torch.Generator(), device=GPU),
    ):
        with pytest.raises(RuntimeError):
            mix()
    with pytest.raises(TypeError):
        x.numpy()
    assert (x + torch.tensor(2.0)).tolist() == [3.0] * 4, "0-dim operands apart"


@pytest.mark.parametrize(
    ("name", "number", "act"),
    [
        ("item", 1, lambda x: x.sum().item()),
        ("tolist", 1, lambda x: x.tolist()),
        ("bool", 1, lambda x: bool((x > 0).all())),
        ("nonzero", 1, lambda x: x.nonzero()),
        ("mask", 1, lambda x: x[x > 0]),
        ("filling a mask", 0, lambda x: x.masked_fill_(x > 0, 1.0)),
        ("repeat_interleave", 1, lambda x: x.repeat_interleave(x.long())),
        ("with its size", 0, lambda x: x.repeat_interleave(x.long(), output_size=4)),
        ("bincount", 1, lambda x: x.long().bincount()),
        ("equal", 1, lambda x: torch.equal(x, x)),
        ("to the host", 1, lambda x: x.cpu()),
        ("from the host", 1, lambda x: torch.tensor([1.0, 2.0], device=x.device)),
        ("without a wait", 0, lambda x: torch.ones(3).to(x.device, non_blocking=True)),
        ("arithmetic", 0, lambda x: (x + 1).div_(x).cumsum(0)),
    ],
)
def test_waits_are_counted(name: str, number: int, act: object) -> None:
    x = torch.ones(4, device=GPU)
    with counting.counted() as counts:
        act(x)  # type: ignore[operator]
    assert counts.num_waits() == number, name


def test_views_are_no_launches() -> None:
    x = torch.ones(4, 6, device=GPU)
    with counting.counted() as counts:
        y: Tensor = x[1:].t().reshape(6, 3).detach().unsqueeze(0)
        torch.empty_like(y)
    assert counts.num_launches == 0
    with counting.counted() as counts:
        x.add_(1)
    assert counts.num_launches == 1 and counts.moved == 2 * 4 * 24


def test_new_threads_have_the_device() -> None:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(torch.zeros(2, device=GPU) + 1))
    thread.start()
    thread.join()
    assert found[0].device == GPU and found[0].tolist() == [1.0, 1.0]
