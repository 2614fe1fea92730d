"""Process groups are made apart from the default group, and destroyed once."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from tests.unit.shared import for_each

from laconic.comm.naming import _all_are_being_destroyed, in_store, not_split_off
from laconic.comm.posted import PostedComm
from laconic.core.errors import PeerError


@for_each("device", [None, "cuda:1"])
def test_a_new_group_is_not_split_off_a_default_group_with_a_device(monkeypatch, device):
    default = SimpleNamespace(bound_device_id=device)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: default)
    with pytest.raises(ZeroDivisionError), not_split_off():
        assert default.bound_device_id is None
        raise ZeroDivisionError
    assert default.bound_device_id == device


def test_keys_differ_between_restarts_only_in_a_shared_store(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert in_store("group") == "laconic/2/group"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert in_store("group") == "laconic/2/group"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")  # nodes count their restarts separately
    assert in_store("group") == "laconic/0/group"


def test_two_ranks_on_one_gpu_are_told_how_to_choose_another():
    for cause, words in (
        (
            "ncclInvalidUsage: Duplicate GPU detected : rank 0 and rank 1",
            r"another rank use one GPU.*set_device\(local_rank\)",
        ),
        (
            "Connection closed by peer. This is typically due to a crash",
            "all_reduce of 2 ranks: Connection closed by peer",
        ),
    ):
        peers = PostedComm._peers(SimpleNamespace(rank=1, size=2), "all_reduce")
        with pytest.raises(PeerError, match=words), peers:
            raise RuntimeError(cause)


@for_each("enabled", [True, False])
@for_each("error", [None, RuntimeError])
def test_no_garbage_is_collected_while_frames_are_listed(monkeypatch, enabled, error):
    """Before Python 3.13 a collection inside `sys._current_frames` can deadlock (cpython issue 106883)."""
    inside = []

    def current_frames():
        inside.append(gc.isenabled())
        if error is not None:
            raise error
        return {}

    monkeypatch.setattr(sys, "_current_frames", current_frames)
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        if error is None:
            assert not _all_are_being_destroyed()
        else:
            with pytest.raises(error):
                _all_are_being_destroyed()
        after = gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()
    assert inside == [False] and after is enabled
