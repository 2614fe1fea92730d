"""`laconic run`: a script on several workers, by torch.distributed.run, with all of its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from laconic.core.errors import SpecError

PASS_THROUGH = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "allow_extra_args": True,
}
MEETING = ("--rdzv", "--master", "--node", "--nnodes", "--standalone")  # flags that say where workers meet


def run(
    arguments: Annotated[list[str], typer.Argument(metavar="SCRIPT [FLAGS...] [-- ARGS...]")],
) -> None:
    """Run SCRIPT on several workers: `laconic run train.py --nproc-per-node 2 --max-restarts 3 -- --lr 0.1`.

    FLAGS are those of torchrun. They may also come before SCRIPT, as torchrun has them; what follows SCRIPT
    then belongs to it. Workers of one machine find each other without a flag.
    """
    if not arguments[0].startswith("-") and not Path(arguments[0]).exists():
        raise SpecError(f"there is no script {arguments[0]!r} in {Path.cwd()}")
    from torch.distributed.run import main  # slow to import: only where it is used

    main(torchrun_arguments(arguments))


def torchrun_arguments(arguments: list[str]) -> list[str]:
    """Either order of flags and script in torchrun's order.

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
