"""`laconic lab`: runs a command on several emulated hosts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.units import format_count
from laconic.tools.cli.console import errors
from laconic.tools.cli.interrupts import Interrupts
from laconic.tools.cli.startup import INTERRUPTED
from laconic.tools.lab import Lab, Link, Profile, profile
from laconic.tools.lab.waiting import CommandFailed, OutOfTime
from laconic.tools.tasks.place import Hosts

OUT_OF_TIME = 124  # as `timeout`
MB = 1e6


def lab(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...")],
    hosts: Annotated[int, typer.Option(help="number of hosts, 1 to 64")] = 4,
    link: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="rate of each host's link: 1gbit, 100mbit [default: unlimited]"),
    ] = None,
    up: Annotated[
        str | None, typer.Option(metavar="RATE", help="upload rate of each host [default: --link]")
    ] = None,
    down: Annotated[
        str | None, typer.Option(metavar="RATE", help="download rate of each host [default: --link]")
    ] = None,
    delay: Annotated[str | None, typer.Option(metavar="TIME", help="one-way delay: 2ms, 500us")] = None,
    jitter: Annotated[str | None, typer.Option(metavar="TIME", help="uniform variation of the delay")] = None,
    loss: Annotated[str | None, typer.Option(metavar="SHARE", help="share of packets lost: 1%")] = None,
    profile_: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="NAME",
            help="ethernet-1g, ethernet-100m, wifi, wan-3-regions or dsl; other options override parts of it",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="stop the command after this time [default: never]"),
    ] = None,
    once: Annotated[
        bool,
        typer.Option("--once", help="run COMMAND on the first host only, as `laconic train` always does"),
    ] = False,
    offload: Annotated[
        bool,
        typer.Option(
            "--offload", help="use packets of 64 kB: less CPU on fast links, less exact byte counts"
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="seed of losses and jitter if the kernel has no netem")] = 0,
) -> None:
    """Run COMMAND on each of several emulated hosts on this machine, with torchrun's environment variables.

    Example: `laconic lab --hosts 4 --link 100mbit --delay 2ms -- python train.py`. If COMMAND is
    `laconic train`, it starts its own workers and spreads them over the hosts. Needs iproute2, and root or a
    kernel with user namespaces. The lab is removed when the command ends.
    """
    chosen = settings(profile_, rate=link, up=up, down=down, delay=delay, jitter=jitter, loss=loss)
    if timeout is not None:
        arguments.number("--timeout", timeout, above=0)
    stderr = errors()
    try:
        with Interrupts(), Lab(hosts, chosen, offload=offload, seed=seed) as emulated:
            relayed = ", relayed packet by packet" if emulated.means == "relay" else ""
            stderr.print(
                f"laconic: {format_count(hosts, 'host')}, each {chosen.link}{relayed}",
                style="dim",
                markup=False,
            )
            if places := stages_on_hosts(command, hosts):
                stderr.print(f"laconic: {places}", style="dim", markup=False)
            run = emulated.run_once if once or starts_workers(command) else emulated.run
            try:
                run(command, timeout_s=timeout, capture=False)
            finally:
                stderr.print(f"laconic: {traffic(emulated)}", style="dim", markup=False)
    except CommandFailed as failure:
        stderr.print(f"laconic: {failure}", style="bold red", markup=False)
        raise typer.Exit(failure.code) from None
    except OutOfTime as error:
        stderr.print(f"laconic: {error}", style="bold red", markup=False)
        raise typer.Exit(OUT_OF_TIME) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def settings(name: str | None, **given: str | None) -> Profile:
    """Return the named profile, or unlimited links, with the given quantities.

    >>> settings("dsl", rate=None, up="2mbit").link.bits_up
    2000000.0
    """
    chosen = Profile(Link()) if name is None else profile(name)
    changed = {quantity: text for quantity, text in given.items() if text is not None}
    if name is not None and "rate" in changed:
        raise SpecError("--link and --profile both set the rate: give one of them, or --up and --down")
    return replace(chosen, link=replace(chosen.link, **changed))


def starts_workers(command: list[str]) -> bool:
    """Return whether a command is `laconic train`.

    >>> starts_workers(["/opt/bin/laconic", "train", "digits"]), starts_workers(["python", "train.py"])
    (True, False)
    """
    return Path(command[0]).name == "laconic" and command[1:2] == ["train"]


def stages_on_hosts(command: list[str], hosts: int) -> str:
    """Describe the hosts of a pipeline's stages.

    >>> stages_on_hosts(["laconic", "train", "shakespeare", "--stages", "2", "--replicas=2"], 4)
    'stages by host (replica.stage): 0.0; 0.1; 1.0; 1.1'
    """
    if not starts_workers(command):
        return ""
    stages, replicas = _option(command, "--stages"), _option(command, "--replicas") or 1
    if stages is None or stages < 2 or replicas < 1:
        return ""
    size, placed = stages * replicas, Hosts(tuple(map(str, range(hosts))))
    held: list[list[int]] = [[] for _ in range(hosts)]
    for rank in range(size):
        held[placed.of(rank, size)].append(rank)
    names = [", ".join(f"{rank // stages}.{rank % stages}" for rank in each) or "none" for each in held]
    text = f"stages by host (replica.stage): {'; '.join(names)}"
    shared = sum(after % stages > 0 for each in held for after in each[1:])
    if shared:
        of = f"{shared} of {(stages - 1) * replicas} boundaries"
        text += f"; what crosses {of} stays on one host: --hosts {size} has a link for each"
    return text


def _option(command: list[str], name: str) -> int | None:
    words = " ".join(command).replace(f"{name}=", f"{name} ").split()
    after = [value for option, value in pairwise(words) if option == name]
    return int(after[-1]) if after and after[-1].isdecimal() else None


def traffic(emulated: Lab) -> str:
    counted = emulated.counters()
    sent = " ".join(f"{each.sent / MB:.4g}" for each in counted)
    received = " ".join(f"{each.received / MB:.4g}" for each in counted)
    return f"MB by host: sent {sent}; received {received}"
