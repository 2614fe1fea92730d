"""Program that `laconic run` starts on each worker; the launcher prints errors raised on purpose once."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import TracebackType

from laconic.core.errors import LaconicError
from laconic.tools.cli.startup import INTERRUPTED, LAUNCHER, WORKER, exit_on_interrupt, raise_on_interrupt
from laconic.tools.lab import linux

OWN = (WORKER, __file__, "<frozen runpy>", runpy.__file__)
HOME = Path(__file__).parent


def main() -> None:
    exit_on_interrupt()
    end_with_launcher()
    import_module("torch.distributed.elastic.multiprocessing.errors")  # takes seconds
    raise_on_interrupt()
    sys.excepthook = report
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


def end_with_launcher() -> None:
    """Exit if the launcher has ended, as by an interrupt while it starts workers.

    On Linux, receive SIGTERM when it ends.
    """
    if sys.platform == "linux":
        linux.die_with_parent(signal.SIGTERM)
    if os.getppid() != int(os.environ[LAUNCHER]):
        os._exit(INTERRUPTED)


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    while trace is not None and trace.tb_frame.f_code.co_filename in OWN:
        trace = trace.tb_next
    place = traceback.extract_tb(trace)[:1]
    if isinstance(error, KeyboardInterrupt) and place and Path(place[0].filename).is_relative_to(HOME):
        return  # raised while the worker starts
    if isinstance(error, LaconicError):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        where = f" ({place[0].filename}, line {place[0].lineno})" if place else ""
        get_error_handler().record_exception(type(error)(f"{error}{where}"))
    else:
        traceback.print_exception(kind, error, trace)
