"""The lines of `laconic doctor` about GPUs."""

from __future__ import annotations

import pytest
import torch

from laconic.kernels import dispatch
from laconic.tools.cli import doctor


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two equal cards."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(doctor.dist, "is_nccl_available", lambda: True)
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)


def with_triton(monkeypatch: pytest.MonkeyPatch, why: str | None) -> None:
    monkeypatch.setattr(dispatch, "triton_missing", lambda: why)


def test_without_a_gpu_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.gpu_facts() == [("  CUDA", "no device")]


def test_cards_and_kernels_are_named(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with_triton(monkeypatch, None)
    rows = dict(doctor.gpu_facts())
    assert rows["  CUDA"] == "13.0, 2 devices: NVIDIA H200"
    assert rows["  GPU tensors"].startswith("Triton: ") and "minmax" in rows["  GPU tensors"]
    assert rows["  NCCL"].startswith("2.28.9; set NCCL_LAUNCH_ORDER_IMPLICIT=1")
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    assert dict(doctor.gpu_facts())["  NCCL"] == "2.28.9; NCCL_LAUNCH_ORDER_IMPLICIT=1"


def test_an_old_triton_is_missing(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "Triton 3.5.0 is older than 3.6: install a newer torch"
    with_triton(monkeypatch, why)
    assert dict(doctor.gpu_facts())["  GPU tensors"] == f"plain torch, slower: {why}"
    assert any("on CUDA tensors" in line and why in line for line in doctor._missing())
