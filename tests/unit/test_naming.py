"""Process groups are made so that NCCL does not split them off the default group."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from tests.unit.shared import for_each

from laconic.comm.naming import not_split_off
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
