"""One process of a part: it runs the part's module until the end, or until its parent ends it."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import sys
import time
from typing import NoReturn

import torch

from benchmarks.gpu.job import Job


def child(options: argparse.Namespace) -> NoReturn:
    """Run one shard of one part, and end the process; the exit code is 1 if it fails."""
    shard, shards = (int(word) for word in options.shard.split("/"))
    seconds = options.end - time.monotonic()  # one clock for all processes
    faulthandler.dump_traceback_later(max(1.0, seconds + 1), file=sys.stderr)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    job = Job(options.part, device, options.out, options.end - time.monotonic(), shard - 1, shards)
    try:
        importlib.import_module(f"benchmarks.gpu.{options.part}").run(job)
    except BaseException as error:
        job.fail("the part as a whole", error)
        raise
    job.finish()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(any(row.get("ok") is False for row in job.rows)))  # a broken device may block Python's end
