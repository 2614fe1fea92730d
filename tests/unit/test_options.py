"""Options of `laconic train`: a field is a flag, a check, an entry of config.json and a worker's setting."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Literal

import pytest
import typer
from typer.testing import CliRunner

from laconic.core.errors import SpecError
from laconic.tools.cli.command import command
from laconic.tools.cli.settings import Options, Settings
from laconic.tools.tasks.options import at_least, check_each, fixed, flag, info, option, options, whole
from laconic.tools.tasks.settings import TrainingSettings


@dataclass(frozen=True, kw_only=True)
class Base:
    bits: int | None = option("of a weight", check=whole(2, 8), fixed=True)


@dataclass(frozen=True, kw_only=True)
class Some(Base):
    task: str = option("what is learnt", MISSING)
    specs: tuple[str, ...] = option("methods", (), flag="--with")
    across: Literal["ranks", "batch"] = option("where", "ranks")
    out: Path = option("folder", Path("runs"))
    resume: bool = option("go on", False)
    steps: int = option("steps", 1, check=at_least(1))


def test_fields_become_flags_of_their_types() -> None:
    seen: list[Some] = []
    app = typer.Typer()
    app.command()(command(Some)(seen.append))
    for given in ("digits", "digits --with a --with b --bits 3 --across batch --out x --resume --steps 2"):
        done = CliRunner().invoke(app, given.split())
        assert done.exit_code == 0, done.output
    more = Some(task="digits", specs=("a", "b"), bits=3, across="batch", out=Path("x"), resume=True, steps=2)
    assert seen == [Some(task="digits"), more]
    assert CliRunner().invoke(app, ["digits", "--bits", "x"]).exit_code == 2
    assert [each.name for each in options(Some)][-1] == "bits", "those of a class before those of its base"


def test_a_value_is_checked_by_its_option() -> None:
    check_each(Some, Some(task="digits"))
    for wrong, said in (
        ({"bits": 9}, r"--bits must be .* in 2\.\.8, got 9"),
        ({"steps": 0}, "--steps must be 1"),
    ):
        with pytest.raises(SpecError, match=said):
            check_each(Some, Some(task="digits", **wrong))


def test_every_option_is_described_and_reaches_the_workers_or_the_run(tmp_path: Path) -> None:
    settings = Settings.of(Options(task="digits", methods=("dense()",), out=tmp_path, name="x"))
    config = settings.config()
    for each in options(Options):
        assert info(each).help and flag(each).startswith("--")
        assert (each.name in config) == info(each).recorded, each.name
    assert {*fixed(Options)} <= config.keys()
    assert {each.name for each in options(TrainingSettings)} <= {each.name for each in fields(Settings)}
