"""Process groups are made so that NCCL does not split them off the default group."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from laconic.comm.naming import not_split_off
from laconic.comm.posted import PostedComm
from laconic.core.errors import PeerError


@pytest.mark.parametrize("device", [None, "cuda:1"])
def test_a_new_group_is_not_split_off_a_default_group_with_a_device(monkeypatch, device):
    default = SimpleNamespace(bound_device_id=device)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: default)
    with pytest.raises(ZeroDivisionError), not_split_off():
        assert default.bound_device_id is None
        raise ZeroDivisionError
    assert default.bound_device_id == device


def test_two_ranks_on_one_gpu_are_told_how_to_choose_another():
    rank = SimpleNamespace(rank=1, size=2)
    with (
        pytest.raises(PeerError, match=r"another rank use one GPU.*set_device\(local_rank\)"),
        PostedComm._peers(rank, "all_reduce"),
    ):
        raise RuntimeError("ncclInvalidUsage: Duplicate GPU detected : rank 0 and rank 1")
    with (
        pytest.raises(PeerError, match="all_reduce of 2 ranks: Connection closed by peer"),
        PostedComm._peers(rank, "all_reduce"),
    ):
        raise RuntimeError("Connection closed by peer. This is typically due to a crash")
