"""`laconic lab`: a command on several emulated hosts, over links of any speed, delay and loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from laconic.cli.console import errors
from laconic.cli.interrupts import Interrupts
from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.lab import Lab, Link, Profile, profile
from laconic.lab.waiting import CommandFailed, OutOfTime

INTERRUPTED, OUT_OF_TIME = 130, 124  # exit codes, as shells and `timeout` have them
MB = 1e6


def lab(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...")],
    hosts: Annotated[int, typer.Option(help="1 to 64")] = 4,
    link: Annotated[str | None, typer.Option(metavar="RATE", help="of each host: 1gbit, 100mbit")] = None,
    up: Annotated[
        str | None, typer.Option(metavar="RATE", help="what a host sends [default: --link]")
    ] = None,
    down: Annotated[
        str | None, typer.Option(metavar="RATE", help="what a host receives [default: --link]")
    ] = None,
    delay: Annotated[str | None, typer.Option(metavar="TIME", help="one way: 2ms, 500us")] = None,
    jitter: Annotated[
        str | None, typer.Option(metavar="TIME", help="so much sooner or later, evenly drawn")
    ] = None,
    loss: Annotated[str | None, typer.Option(metavar="SHARE", help="of all packets: 1%")] = None,
    profile_: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="NAME",
            help="ethernet-1g, ethernet-100m, wifi, wan-3-regions or dsl; other options change it",
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="end the command then [default: never]")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="run COMMAND on the first host alone; `laconic train` always is")
    ] = False,
    offload: Annotated[
        bool,
        typer.Option(
            "--offload", help="packets of 64 kB: fast links cost less, bytes are counted less exactly"
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="draws what is lost and late, where the kernel has no netem")] = 0,
) -> None:
    """Run COMMAND on every one of several emulated hosts of this machine, in torchrun's environment.

    `laconic lab --hosts 4 --link 100mbit --delay 2ms -- python train.py`. `laconic train` starts its own
    workers, and spreads them over the hosts. Takes root, or a kernel that lets users have namespaces, and
    iproute2. Nothing of the lab outlives this command.
    """
    chosen = settings(profile_, rate=link, up=up, down=down, delay=delay, jitter=jitter, loss=loss)
    if timeout is not None:
        arguments.number("--timeout", timeout, above=0)
    say = errors()
    try:
        with Interrupts(), Lab(hosts, chosen, offload=offload, seed=seed) as made:
            relayed = ", relayed packet by packet" if made.means == "relay" else ""
            say.print(f"laconic: {hosts} hosts, each {chosen.link}{relayed}", style="dim", markup=False)
            run = made.run_once if once or starts_workers(command) else made.run
            try:
                run(command, timeout_s=timeout, capture=False)
            finally:
                say.print(f"laconic: {told(made)}", style="dim", markup=False)
    except CommandFailed as failure:
        say.print(f"laconic: {failure}", style="bold red", markup=False)
        raise typer.Exit(failure.code) from None
    except OutOfTime as error:
        say.print(f"laconic: {error}", style="bold red", markup=False)
        raise typer.Exit(OUT_OF_TIME) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def settings(name: str | None, **given: str | None) -> Profile:
    """The profile of this name, or links as free as memory, with what was given instead.

    >>> settings("dsl", rate=None, up="2mbit").link.bits_up
    2000000.0
    """
    chosen = Profile(Link()) if name is None else profile(name)
    said = {quantity: text for quantity, text in given.items() if text is not None}
    if name is not None and "rate" in said:
        raise SpecError("--link and --profile both say how fast links are: give one, or --up and --down")
    return replace(chosen, link=replace(chosen.link, **said))


def starts_workers(command: list[str]) -> bool:
    """Whether a command is `laconic train`.

    >>> starts_workers(["/opt/bin/laconic", "train", "digits"]), starts_workers(["python", "train.py"])
    (True, False)
    """
    return Path(command[0]).name == "laconic" and command[1:2] == ["train"]


def told(made: Lab) -> str:
    """What interfaces have counted."""
    counted = made.counters()
    sent = " ".join(f"{each.sent / MB:.4g}" for each in counted)
    received = " ".join(f"{each.received / MB:.4g}" for each in counted)
    return f"by host, sent {sent} MB; received {received} MB"
