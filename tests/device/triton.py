"""Triton kernels on the stand-in device, in Triton's interpreter: a launch counts as one.

With TRITON_INTERPRET=1 and Triton installed. Without, the plain torch code serves the device.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from torch import Tensor

from laconic.kernels import dispatch
from tests.device import counting
from tests.device.device import Gpu, unwrapped

_one_at_a_time = threading.RLock()  # the interpreter patches Triton's language for the length of a launch


def interpreted() -> bool:
    """Whether Triton's interpreter can run the kernels here."""
    return os.environ.get("TRITON_INTERPRET") == "1" and dispatch.triton_missing() is None


def install() -> None:
    """Let `dispatch.gpu` select Triton kernels for the stand-in device, and count their launches."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        held = [unwrapped(each) for each in args]
        named = {key: unwrapped(value) for key, value in kwargs.items()}
        tensors = [each for each in (*held, *named.values()) if isinstance(each, Tensor)]
        counting.launch(f"triton {self.fn.__name__}", moved=sum(map(counting.nbytes, tensors)))
        with counting.paused(), _one_at_a_time:
            return run(self, *held, **named)

    InterpretedFunction.run = counted
    dispatch.gpu = serves


def serves(*tensors: Tensor) -> bool:
    """In the place of `dispatch.gpu`."""
    return not dispatch._reference_only and all(isinstance(each, Gpu) for each in tensors)
