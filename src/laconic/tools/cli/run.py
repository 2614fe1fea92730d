"""`laconic run`: runs a script on several workers through torch.distributed.run."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.core.errors import SpecError
from laconic.tools.cli.console import errors
from laconic.tools.cli.meeting import meeting
from laconic.tools.cli.startup import LAUNCHER, WORKER, interrupts_blocked_in_children

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

FAILED = 1  # exit code if a worker was killed
PASS_THROUGH = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "allow_extra_args": True,
}
MEETING = ("--rdzv", "--master", "--node", "--nnodes", "--standalone")


def run(
    arguments: Annotated[list[str], typer.Argument(metavar="SCRIPT [FLAGS...] [-- ARGS...]")],
) -> None:
    """Run SCRIPT on several workers: `laconic run train.py --nproc-per-node 2 --max-restarts 3 -- --lr 0.1`.

    FLAGS are those of torchrun. They may also precede SCRIPT, as for torchrun; then everything after SCRIPT
    belongs to SCRIPT. On a single machine, workers find each other without any flag.
    """
    script = Path(arguments[0])
    runs = (script / "__main__.py").exists() if script.is_dir() else script.exists()
    if not arguments[0].startswith("-") and not runs:
        raise SpecError(f"there is no script {arguments[0]!r} in {Path.cwd()}; give its path")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import config_from_args, parse_args  # a slow import
    from torch.distributed.run import run as start

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, without its warning
    logging.getLogger("torch.distributed.elastic.multiprocessing").setLevel(logging.CRITICAL)
    os.environ[LAUNCHER] = str(os.getpid())
    given = checked(torchrun_arguments(arguments), parse_args, config_from_args)
    if int(given.max_restarts):  # else restarted workers find old addresses in the store
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    named = given.training_script
    workers_start: AbstractContextManager[None] = contextlib.nullcontext()
    if not given.no_python:
        workers_start = interrupts_blocked_in_children()  # `begin_worker` allows them
        given.training_script_args = [*(["-m"] if given.module else []), named, *given.training_script_args]
        given.training_script, given.module = WORKER, False
    logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.ERROR)
    try:
        with meeting(given), workers_start:
            start(given)  # type: ignore[no-untyped-call]
    except SignalException as error:
        if error.sigval is signal.Signals.SIGINT:
            raise KeyboardInterrupt from None
        raise typer.Exit(128 + error.sigval) from None
    except ChildFailedError as error:
        errors().print(
            f"laconic: {reason(named, *error.get_first_failure())}", style="bold red", markup=False
        )
        raise typer.Exit(max(FAILED, error.get_first_failure()[1].exitcode)) from None


def checked(words: list[str], parse: Callable[..., Any], configure: Callable[..., Any]) -> Any:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            given = parse(words)
            check_numbers(given, configure)
    except SystemExit as end:
        if not end.code:  # --help
            raise
        why = (said.getvalue().strip().splitlines() or ["wrong arguments"])[-1].rpartition("error: ")[2]
    except SpecError:
        raise
    except ValueError as error:
        why = str(error)
    else:
        return given
    raise SpecError(f"torchrun: {why}; `laconic run --help` shows the order, `torchrun --help` its flags")


def check_numbers(given: Any, configure: Callable[..., Any]) -> None:
    if int(given.max_restarts) < 0:
        raise SpecError(f"--max-restarts must be 0 (none) or more, got {given.max_restarts}")
    fewest, _, most = given.nnodes.partition(":")
    if not 0 < int(fewest) <= int(most or fewest):
        raise SpecError(f"--nnodes must be 1 or more, or a range such as 1:4, got {given.nnodes}")
    config, *_ = configure(given)
    if config.nproc_per_node < 1:
        raise SpecError(f"--nproc-per-node must be 1 or more, got {given.nproc_per_node}")


def reason(script: str, rank: int, failure: ProcessFailure) -> str:
    record: Any = failure.message  # torch's type says str
    if isinstance(record, dict):
        message = str(record["message"]).partition(": ")[2]
        return message if message.startswith(f"rank {rank}") else f"rank {rank}: {message}"
    if failure.exitcode < 0:
        return f"rank {rank}: {script} was killed by {failure.signal_name()}"
    return f"rank {rank}: {script} ended with exit code {failure.exitcode}; its output is above"


def torchrun_arguments(arguments: list[str]) -> list[str]:
    """Put flags and script into torchrun's order.

    >>> torchrun_arguments(["train.py", "--nproc-per-node", "2", "--", "--lr", "1"])
    ['--standalone', '--nproc-per-node', '2', 'train.py', '--lr', '1']
    >>> torchrun_arguments(["--nproc-per-node", "2", "train.py", "--lr", "1"])
    ['--standalone', '--nproc-per-node', '2', 'train.py', '--lr', '1']
    """
    if arguments[0] == "--":
        raise SpecError("laconic run needs a script: laconic run train.py --nproc-per-node 2 -- --lr 0.1")
    if arguments[0].startswith("-"):
        flags, rest = [], arguments
    else:
        cut = arguments.index("--") if "--" in arguments else len(arguments)
        flags, rest = arguments[1:cut], [arguments[0], *arguments[cut + 1 :]]
    alone = not any(argument.replace("_", "-").startswith(MEETING) for argument in arguments)
    return [*(["--standalone"] if alone else []), *flags, *rest]
