"""The `laconic` command. Errors raised on purpose print one red line and exit with 2."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from laconic.core.errors import LaconicError
from laconic.core.version import __version__
from laconic.tools.cli.console import errors
from laconic.tools.cli.demo import demo
from laconic.tools.cli.disk import full
from laconic.tools.cli.doctor import doctor
from laconic.tools.cli.federate import federate
from laconic.tools.cli.lab import lab
from laconic.tools.cli.methods import methods
from laconic.tools.cli.partition import partition
from laconic.tools.cli.plan import plan
from laconic.tools.cli.presets import BRIEFLY
from laconic.tools.cli.probe import probe
from laconic.tools.cli.run import PASS_THROUGH, run
from laconic.tools.cli.startup import INTERRUPTED, forget_interrupt, raise_on_interrupt, say_interrupted
from laconic.tools.cli.topology import topology
from laconic.tools.cli.train import train


class Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            raise_on_interrupt()
            return super().invoke(ctx)
        except KeyboardInterrupt:
            say_interrupted()
            raise typer.Exit(INTERRUPTED) from None
        except LaconicError as error:
            errors().print(f"laconic: {error}", style="bold red", markup=False)
            raise typer.Exit(2) from None
        except OSError as error:
            if (words := full(error)) is None:
                raise
            errors().print(f"laconic: {words}", style="bold red", markup=False)
            raise typer.Exit(2) from None
        finally:
            forget_interrupt()


def show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"laconic {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # rich's own would swallow "[default: ...]"
    help="Distributed deep learning in few words: send what matters, count every byte, keep the accuracy.\n\n"
    f"Methods: {BRIEFLY}.",
)


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="show the version"),
    ] = False,
) -> None:
    """Handle common options."""


app.command()(demo)
app.command()(train)
app.command()(federate)
app.command(context_settings=PASS_THROUGH)(run)
app.command(context_settings=PASS_THROUGH)(lab)
app.command()(methods)
app.command()(topology)
app.command()(partition)
app.command()(plan)
app.command()(probe)
app.command()(doctor)
