"""A thread that comes back from C++ while Python is finalised does not change the script's exit code."""

from __future__ import annotations

import sys

import pytest

from laconic import kernels
from tests.dist.commands import finish, start

# The thread waits in C++ for 4 s, or 2 s where nobody waits for it, and Python's end takes longer: 2 s for a
# thread of ours, and 4 s for `slow`.
SCRIPT = """
import sys, threading, time
from datetime import timedelta
import torch.distributed as dist
from laconic.comm import at_exit

class Slow:
    def __del__(self):
        time.sleep(4)

def wait():
    store.wait(["never"], timedelta(seconds=4 if {ours} else 2))

slow = Slow()
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
if {ours}:
    at_exit.start_thread(wait, "late", end=lambda: None)
else:
    threading.Thread(target=wait, daemon=True).start()
time.sleep(0.2)
{ending}
"""
ENDINGS = {"pass": 0, "raise ZeroDivisionError": 1, "sys.exit(5)": 5}


@pytest.mark.skipif(kernels.info()["missing"] is not None, reason="only compiled code can park a thread")
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python parks such threads itself")
def test_the_exit_code_stays() -> None:
    scripts = {
        (ending, ours): start(sys.executable, "-c", SCRIPT.format(ours=ours, ending=ending))
        for ending, ours in [("pass", False), *((ending, True) for ending in ENDINGS)]
    }
    codes = {which: finish(process).code for which, process in scripts.items()}
    assert codes == {(ending, ours): ENDINGS[ending] for ending, ours in scripts}
