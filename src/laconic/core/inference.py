"""Decorator for methods that create or change state: tensors made in inference mode can never be changed
outside it, nor saved by autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Kind = TypeVar("Kind", bound=type)


def outside_inference_mode(*methods: str) -> Callable[[Kind], Kind]:
    """Make these methods of a class leave inference mode.

    >>> @outside_inference_mode("reset")
    ... class Sum:
    ...     def reset(self):
    ...         self.value = torch.zeros(())
    >>> total = Sum()
    >>> with torch.inference_mode():
    ...     total.reset()
    >>> total.value.is_inference()
    False
    """

    def decorate(kind: Kind) -> Kind:
        for name in methods:
            setattr(kind, name, _left(kind.__dict__[name]))
        return kind

    return decorate


def _left(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False):
            return method(*args, **kwargs)

    return outside
