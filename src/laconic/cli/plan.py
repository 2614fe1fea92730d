"""`laconic plan`: what a step will cost by each method, for these workers on this link, and which to take."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from laconic.cli.console import console
from laconic.cli.files import write_svg
from laconic.core import units
from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.plan.forecast import Forecast, choice, forecasts, reason
from laconic.plan.network import Network
from laconic.plan.probe import Probe
from laconic.plan.rehearsal import Rehearsed, rehearse
from laconic.plan.step import Work, buckets
from laconic.report.plan_picture import picture
from laconic.strategies.method import lift

DENSE = "dense()"
USUAL = (
    "fp16()",
    "natural()",
    "qsgd(levels=7)",
    "cgx(bits=4)",
    "terngrad()",
    "powersgd(rank=4)",
    "stc(density=0.01)",
    "dgc(density=0.001)",
    "deft(density=0.001)",
    "oktopk(density=0.001)",
)
MOST_WORKERS = 4096
MOST_PARAMS = 10**12
SIDE = 1024  # of the square matrices that stand for a model of which only the size is known


def plan(
    params: Annotated[str | None, typer.Option(help="of the model, such as 25.6M")] = None,
    workers: Annotated[str | None, typer.Option(help="a number, some (4,8,16), or a range (4..256)")] = None,
    link: Annotated[str | None, typer.Option(help="each worker's rate, such as 1gbit or 100mbit")] = None,
    backward: Annotated[str | None, typer.Option(help="time of a backward pass, such as 120ms")] = None,
    forward: Annotated[str | None, typer.Option(help="of a forward pass [default: half of backward]")] = None,
    update: Annotated[str | None, typer.Option(help="of the optimiser's step [default: 0ms]")] = None,
    latency: Annotated[str | None, typer.Option(help="of one message [default: 50us]")] = None,
    cores: Annotated[float | None, typer.Option(help="that each worker has for itself [default: 2]")] = None,
    probe: Annotated[
        Path | None, typer.Option(help="of laconic probe: what is not told comes from it")
    ] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", help='a method, "dgc(density=0.01)"; may be repeated [default: usual ones]'),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="draw the curves here, as SVG")] = None,
) -> None:
    """Forecast step time, bytes and scaling of each method, and say which one to take and why."""
    known = None if probe is None else Probe.load(probe)
    told = {"--params": params, "--workers": workers, "--link": link, "--backward": backward}
    if known is None and (missing := [name for name, value in told.items() if value is None]):
        raise SpecError(
            f"laconic plan needs {' and '.join(missing)}, or --probe with a file of laconic probe"
        )
    sizes = read_workers(workers or str(known.size if known else 0))
    layout = (
        layout_of(units.count("--params", params)) if params else Layout.of(known.layout if known else ())
    )
    work = work_of(layout, known, forward, backward, update, cores)
    network = network_of(known, link, latency)
    methods = [lift(spec) for spec in dict.fromkeys((DENSE, *(with_ or USUAL)))]
    rehearsed = {each.spec: each for each in known.methods} if known and not params else {}
    screen = console()
    with screen.status("rehearsing", spinner="dots") as status:
        for each in rehearse([method for method in methods if repr(method) not in rehearsed], layout):
            rehearsed[each.spec] = each
            status.update(f"rehearsed {each.spec}")
    shown = [rehearsed[repr(method)] for method in methods]
    if out is not None:
        title = f"{layout.numel / 1e6:,.3g} M parameters, {units.told_rate(8 * network.bytes_a_second)}"
        write_svg(out, picture(shown, sizes, work, network, title))
    show(screen, shown, sizes, work, network)
    if out is not None:
        screen.print(Text(f"picture: {out}", "dim"))


def work_of(
    layout: Layout,
    known: Probe | None,
    forward: str | None,
    backward: str | None,
    update: str | None,
    cores: float | None,
) -> Work:
    """What a worker computes: as told, else as probed, else as is usual."""
    if cores is not None and cores <= 0:
        raise SpecError(f"--cores must be above 0, got {cores}: 0.5 is one core for two workers")
    probed = known.work if known else Work(0.0, 0.0, 0.0, ())
    backward_s = units.seconds("--backward", backward) if backward else probed.backward_s
    usual_s = backward_s / 2 if backward or not known else probed.forward_s
    cut = buckets(4 * layout.numel)
    return Work(
        units.seconds("--forward", forward, least=0.0) if forward else usual_s,
        backward_s,
        units.seconds("--update", update, least=0.0) if update else probed.update_s,
        cut,
        cores or probed.cores,
        probed.ready if probed.buckets == cut else (),
    )


def network_of(known: Probe | None, link: str | None, latency: str | None) -> Network:
    """The links: as told, else as probed, else of the usual latency."""
    network = known.network if known else Network(0.0)
    if link:
        network = replace(network, bytes_a_second=units.bits_a_second("--link", link) / 8)
    if latency:
        told = units.seconds("--latency", latency, least=0.0)
        network = replace(network, latency_s=told, busy_latency_s=None)
    return network


def read_workers(text: str) -> list[int]:
    """Numbers of workers: as told, or doubled from the first to the last of a range.

    >>> read_workers("4..20"), read_workers("8"), read_workers("2,6")
    ([4, 8, 16, 20], [8], [2, 6])
    """
    if not re.fullmatch(r"\d+(\.\.\d+|(,\d+)*)", text):
        raise SpecError(f"--workers must be such as 8, 4,8,16 or 4..256, got {text!r}")
    if ".." in text:
        first, last = map(int, text.split(".."))
        if not 0 < first <= last:
            raise SpecError(f"--workers goes from a smaller number to a larger one, got {text!r}")
        found = [first << i for i in range(16) if first << i < last] + [last]
    else:
        found = sorted(set(map(int, text.split(","))))
    if found[0] < 2 or found[-1] > MOST_WORKERS:
        raise SpecError(f"--workers must be 2..{MOST_WORKERS}, got {text!r}: one worker sends nothing")
    return found


def layout_of(params: int) -> Layout:
    """A model of so many parameters, of which nothing else is known: square matrices."""
    if params > MOST_PARAMS:
        raise SpecError(f"--params must be at most {MOST_PARAMS:,}, got {params:,}")
    whole, rest = divmod(params, SIDE * SIDE)
    shapes = [(SIDE, SIDE)] * whole + ([(1, rest)] if rest else [])
    return Layout.of((f"layer{i}.weight", shape) for i, shape in enumerate(shapes))


def show(screen: Console, rehearsed: list[Rehearsed], sizes: list[int], work: Work, network: Network) -> None:
    """The table, fastest first at the most workers, and the advice for each number of them."""
    ranked = {size: forecasts(rehearsed, size, work, network) for size in sizes}
    chosen = {size: choice(ranked[size]) for size in sizes}
    last = sizes[-1]
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("method", style="cyan", overflow="fold")
    table.add_column(f"MB a step, {last} workers", justify="right")
    for size in sizes:
        table.add_column(f"ms, {size}", justify="right")
    table.add_column(f"efficiency, {last}", justify="right")
    for best in ranked[last]:
        cells = [_cell(_of(best.spec, ranked[size]), chosen[size]) for size in sizes]
        table.add_row(best.spec, f"{best.nbytes / 1e6:.3g}", *cells, f"{best.split.efficiency:.0%}")
    screen.print(table)
    screen.print(
        f"A step with no communication takes {units.told_seconds(work.alone_s)}. MB: on the wire, each way."
        " Encoding and decoding are as fast as on this machine.",
        style="dim",
    )
    for spec, group in groupby(sizes, key=lambda size: chosen[size].spec):
        of = list(group)
        told = f"{of[0]} workers" if len(of) == 1 else f"{of[0]} to {of[-1]} workers"
        dense = _of(DENSE, ranked[of[-1]])
        why = reason(chosen[of[-1]], ranked[of[-1]], dense)
        screen.print(Text.assemble((f"{told}: ", "bold"), (spec, "cyan"), f": {why}"))


def _of(spec: str, found: list[Forecast]) -> Forecast:
    return next(each for each in found if each.spec == spec)


def _cell(each: Forecast, chosen: Forecast) -> Text:
    return Text(f"{1e3 * each.split.step_s:,.4g}", "bold green" if each is chosen else "")
