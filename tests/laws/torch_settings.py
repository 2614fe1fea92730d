"""Global settings of torch, each opened for a block: none of them may change what Laconic computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

SETTINGS = ("float64", "bfloat16", "meta", "deterministic", "inference_mode")


@contextmanager
def torch_setting(name: str) -> Iterator[None]:
    """A global setting: a default dtype, a default device or deterministic algorithms."""
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    if name in ("float64", "bfloat16"):
        torch.set_default_dtype(getattr(torch, name))
    elif name == "deterministic":
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic)


@contextmanager
def in_thread(name: str) -> Iterator[None]:
    """The part of a setting that each thread has for itself: the default device."""
    with torch.device(name) if name == "meta" else nullcontext():
        yield


@contextmanager
def evaluating(name: str) -> Iterator[None]:
    """Where a script saves, loads and evaluates: in inference mode, if that is the setting."""
    with torch.inference_mode(name == "inference_mode"):
        yield


@contextmanager
def opened(name: str) -> Iterator[None]:
    """A setting in a program of one thread."""
    with torch_setting(name), in_thread(name):
        yield
