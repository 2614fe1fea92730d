"""Commands of `laconic` run in this process, their tables and their refusals."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from laconic.tools.cli.main import app


def invoke(*arguments: object) -> Result:
    """Run a command of `laconic` in this process."""
    return CliRunner().invoke(app, [*map(str, arguments)])


def table_of(*arguments: object) -> dict[str, str]:
    """The table that a command prints, by the first word of each line."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    lines = [line.split(maxsplit=1) for line in result.stdout.splitlines()[1:]]
    return {line[0]: line[1].strip() for line in lines}


def one_line(result: Result, words: str) -> None:
    """Assert that a command was refused with one line that has these words."""
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert result.stderr.startswith("laconic: ") and words in result.stderr
