"""A worker of the pool as torchrun would have started it: a trainer finds its rank in the environment."""

from __future__ import annotations

import functools
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

Result = TypeVar("Result")
OTHERS = ("lightning", "accelerate", "transformers", "torch")
TOLD_BY_OTHERS = ("Be aware that when using `ckpt_path`", ".*LeafSpec")  # as if by whoever called them


def launched(job: Callable[..., Result]) -> Callable[..., Result]:
    """A job of a worker, with torchrun's variables; of warnings, only ours are errors."""

    @functools.wraps(job)
    def inside(*args: object) -> Result:
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        before = dict(os.environ)
        os.environ |= {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "GROUP_RANK": "0",
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "tests",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        try:
            with warnings.catch_warnings():
                for package in OTHERS:
                    warnings.filterwarnings("ignore", module=rf"{package}\b")
                for message in TOLD_BY_OTHERS:
                    warnings.filterwarnings("ignore", message)
                return job(*args)
        finally:
            forget_states()
            os.environ.clear()
            os.environ |= before

    return inside


def forget_states() -> None:
    """Accelerate's singletons know the process group of this job."""
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


@contextmanager
def heard(message: str) -> Iterator[None]:
    """Inside, a warning with these words is expected; others are as always."""
    with warnings.catch_warnings(record=True) as found:
        warnings.filterwarnings("always", f".*{re.escape(message)}")
        yield
    assert any(message in str(each.message) for each in found), f"nobody warned: {message}"
