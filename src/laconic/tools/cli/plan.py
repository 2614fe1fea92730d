"""`laconic plan`: forecasts of a step with each method, and advice."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from laconic.core import units
from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.tools.cli.console import console, working
from laconic.tools.cli.files import check_svg, write_svg
from laconic.tools.cli.plan_pipeline import PipelineAsked, plan_pipeline
from laconic.tools.cli.tables import shown
from laconic.tools.plan.contenders import DENSE, contenders, rehearse_all
from laconic.tools.plan.forecast import Forecast, choice, faster_strategies, forecasts, reason
from laconic.tools.plan.network import Network
from laconic.tools.plan.probe import Probe
from laconic.tools.plan.rehearsal import Rehearsed
from laconic.tools.plan.step import Work, buckets
from laconic.tools.report.plan_picture import picture

MAX_WORKERS = 4096
MAX_PARAMS = 10**12
NEEDED = " [required without --probe]"
SIDE, MATRICES = 1024, 24


def plan(
    params: Annotated[
        str | None, typer.Option(help="parameters of the model, such as 25.6M [required without --probe]")
    ] = None,
    workers: Annotated[
        str | None, typer.Option(help="a number, a list 4,8,16 or a range 4..256 [required without --probe]")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="rate of a worker's link: 1gbit, 100mbit [required without --probe]")
    ] = None,
    backward: Annotated[
        str | None, typer.Option(help="time of a backward pass, such as 120ms [required without --probe]")
    ] = None,
    forward: Annotated[str | None, typer.Option(help="forward time [default: half of --backward]")] = None,
    update: Annotated[str | None, typer.Option(help="time of the optimiser's step [default: 0ms]")] = None,
    latency: Annotated[str | None, typer.Option(help="latency of one message [default: 50us]")] = None,
    cores: Annotated[float | None, typer.Option(help="CPU cores per worker [default: 2]")] = None,
    probe: Annotated[Path | None, typer.Option(help="file of `laconic probe`, for what is not given")] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option(
            "--with", help='a method or strategy, "dgc(density=0.01)"; may be repeated [default: common ones]'
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="draw the curves to this SVG file")] = None,
    stages: Annotated[
        int | None,
        typer.Option(help="plan a pipeline with this number of stages; --with then codes their messages"),
    ] = None,
    activation: Annotated[
        str | None,
        typer.Option(
            metavar="SHAPE",
            help="shape of a stage's output in a step, samples first: 32x256x384 [with --stages]",
        ),
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="micro-batches of a step [default: two a stage, if samples allow]")
    ] = None,
    replicas: Annotated[int | None, typer.Option(help="replicas of the pipeline [default: 1]")] = None,
    replicas_with: Annotated[
        list[str] | None,
        typer.Option(help="a method for gradients of weights among replicas; may be repeated"),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="layers that stages divide [default: equal stages]")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="gpipe, 1f1b or interleaved alone [default: all]")
    ] = None,
) -> None:
    """Forecast step time, bytes and scaling of each method, and recommend one with reasons."""
    check_svg(out)
    probed = None if probe is None else Probe.load(probe)
    asked_stages = PipelineAsked(
        stages, activation, micro_batches, replicas, tuple(replicas_with or ()), layers, schedule
    )
    if asked_stages.pipeline:
        asked_stages.check(workers=workers, out=out)
        exchanged = {"--params": params} if (replicas or 1) > 1 else {}
        check_given(probed, {"--link": link, "--backward": backward} | exchanged)
        layout = layout_given(params, probed)
        work = work_of(layout, probed, forward, backward, update, cores)
        plan_pipeline(asked_stages, with_ or (), layout, work, network_of(probed, link, latency))
        return
    given = {"--params": params, "--workers": workers, "--link": link, "--backward": backward}
    check_given(probed, given)
    sizes = read_workers(workers or str(probed.size if probed else 0))
    layout = layout_given(params, probed)
    work = work_of(layout, probed, forward, backward, update, cores)
    network = network_of(probed, link, latency)
    asked = contenders(with_ or ())
    rehearsed = {each.spec: each for each in probed.methods} if probed and not params else {}
    screen = console()
    unknown = [each for each in asked if repr(each) not in rehearsed]
    if unknown:
        with working(screen, f"rehearsing {len(unknown)} methods") as say:
            for each in rehearse_all(unknown, layout):
                rehearsed[each.spec] = each
                say(f"rehearsed {each.spec}")
    found = [rehearsed[repr(each)] for each in asked]
    if out is not None:
        title = f"{layout.numel / 1e6:,.3g} M parameters, {units.format_rate(8 * network.bytes_a_second)}"
        write_svg(out, picture(found, sizes, work, network, title))
    show(screen, found, sizes, work, network)
    if out is not None:
        screen.print(Text(f"picture: {out}", "dim"))


def check_given(probed: Probe | None, given: Mapping[str, str | None]) -> None:
    if probed is None and (missing := [name for name, value in given.items() if value is None]):
        raise SpecError(f"laconic plan needs {', '.join(missing)}; or --probe with a file of laconic probe")


def work_of(
    layout: Layout,
    probed: Probe | None,
    forward: str | None,
    backward: str | None,
    update: str | None,
    cores: float | None,
) -> Work:
    if cores is not None and cores <= 0:
        raise SpecError(f"--cores must be above 0, got {cores}: 0.5 is one core for two workers")
    measured = probed.work if probed else Work(0.0, 0.0, 0.0, ())
    backward_s = units.seconds("--backward", backward) if backward else measured.backward_s
    default_forward_s = backward_s / 2 if backward or not probed else measured.forward_s
    cut = buckets(4 * layout.numel)
    return Work(
        units.seconds("--forward", forward, least=0.0) if forward else default_forward_s,
        backward_s,
        units.seconds("--update", update, least=0.0) if update else measured.update_s,
        cut,
        cores or measured.cores,
        measured.ready if measured.buckets == cut else (),
    )


def network_of(probed: Probe | None, link: str | None, latency: str | None) -> Network:
    network = probed.network if probed else Network(0.0)
    if link:
        network = replace(network, bytes_a_second=units.bits_a_second("--link", link) / 8)
    if latency:
        latency_s = units.seconds("--latency", latency, least=0.0)
        network = replace(network, latency_s=latency_s, busy_latency_s=None)
    return network


def read_workers(text: str) -> list[int]:
    """Parse a list, or a range with doubling numbers.

    >>> read_workers("4..20"), read_workers("8"), read_workers("2,6")
    ([4, 8, 16, 20], [8], [2, 6])
    """
    if not re.fullmatch(r"\d+(\.\.\d+|(,\d+)*)", text):
        raise SpecError(f"--workers must look like 8, 4,8,16 or 4..256, got {text!r}")
    if ".." in text:
        first, last = map(int, text.split(".."))
        if not 0 < first <= last:
            raise SpecError(f"--workers must go from a smaller number to a larger one, got {text!r}")
        found = [first << i for i in range(16) if first << i < last] + [last]
    else:
        found = sorted(set(map(int, text.split(","))))
    if found[0] < 2 or found[-1] > MAX_WORKERS:
        raise SpecError(f"--workers must be in 2..{MAX_WORKERS}, got {text!r}: one worker sends nothing")
    return found


def layout_given(params: str | None, probed: Probe | None) -> Layout:
    return (
        layout_of(units.count("--params", params)) if params else Layout.of(probed.layout if probed else ())
    )


def layout_of(params: int) -> Layout:
    """Return a stand-in for a model: matrices and a vector.

    >>> [entry.shape for entry in layout_of(200_000)][-3:]
    [(91, 91), (13, 91), (73,)]
    """
    if params > MAX_PARAMS:
        raise SpecError(f"--params must be at most {MAX_PARAMS:,}, got {params:,}")
    side = min(SIDE, max(1, math.isqrt(params // MATRICES)))
    whole, rest = divmod(params, side * side)
    rows, last = divmod(rest, side)
    shapes: list[tuple[int, ...]] = [(side, side)] * whole
    shapes += ([(rows, side)] if rows else []) + ([(last,)] if last else [])
    return Layout.of((f"layer{i}.weight", shape) for i, shape in enumerate(shapes))


def show(screen: Console, rehearsed: list[Rehearsed], sizes: list[int], work: Work, network: Network) -> None:
    ranked = {size: forecasts(rehearsed, size, work, network) for size in sizes}
    chosen = {size: choice(ranked[size]) for size in sizes}
    last = sizes[-1]
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("method", style="cyan", overflow="fold")
    table.add_column("points lost", justify="right")
    table.add_column(f"MB a step, {last} workers", justify="right")
    for size in sizes:
        table.add_column(f"ms, {size}", justify="right")
    table.add_column("spread", justify="right")
    table.add_column(f"efficiency, {last}", justify="right")
    for best in ranked[last]:
        cells = [_cell(_of(best.spec, ranked[size]), chosen[size]) for size in sizes]
        lost = "-" if best.lost is None else f"{best.lost:.1f}"
        spread = f"± {best.spread_s / best.split.step_s:.0%}"
        table.add_row(
            best.spec, lost, shown(best.nbytes / 1e6), *cells, spread, f"{best.split.efficiency:.0%}"
        )
    screen.print(table)
    screen.print(
        f"A step with no communication takes {units.format_seconds(work.alone_s)}. MB: on the wire, each way."
        " Encoding and decoding are assumed to be as fast as on this machine; spread: change of a step with"
        " their speed between rehearsals. Points lost: of test accuracy, on the worst of two or"
        " three small trainings (docs/accuracy.md, own_rates.md); -: not measured.",
        style="dim",
    )
    for spec, group in groupby(sizes, key=lambda size: chosen[size].spec):
        alike = list(group)
        first, most = alike[0], alike[-1]
        workers = f"{most} workers" if first == most else f"{first} to {most} workers"
        why = reason(chosen[most], ranked[most], _of(DENSE, ranked[most]))
        screen.print(Text.assemble((f"{workers}: ", "bold"), (spec, "cyan"), f": {why}"))
    if faster := faster_strategies(chosen[last], ranked[last]):
        names = ", ".join(each.spec for each in faster)
        screen.print(
            Text(
                f"A step is shorter with {names}; but their ranks train separately for a while, which changes"
                " the result of training."
            )
        )


def _of(spec: str, found: list[Forecast]) -> Forecast:
    return next(each for each in found if each.spec == spec)


def _cell(each: Forecast, chosen: Forecast) -> Text:
    return Text(shown(1e3 * each.split.step_s), "bold green" if each is chosen else "")
