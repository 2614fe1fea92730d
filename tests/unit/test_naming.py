"""Process groups are made so that NCCL does not split them off the default group."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from laconic.comm.naming import not_split_off


@pytest.mark.parametrize("device", [None, "cuda:1"])
def test_a_new_group_is_not_split_off_a_default_group_with_a_device(monkeypatch, device):
    default = SimpleNamespace(bound_device_id=device)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: default)
    with pytest.raises(ZeroDivisionError), not_split_off():
        assert default.bound_device_id is None
        raise ZeroDivisionError
    assert default.bound_device_id == device
