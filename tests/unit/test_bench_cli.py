"""`laconic bench` runs the benchmarks of the checkout that it is called in, and says what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from laconic.cli.bench import benchmarks, checkout
from laconic.cli.main import app
from laconic.core.errors import SpecError

ROOT = Path(__file__).parents[2]
SOURCE = '''"""Says what it is told.

More.
"""
import sys

if __name__ == "__main__":
    print(*sys.argv[1:])
    sys.exit(3)
'''


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkout with one benchmark, the module that it runs on each worker, and one that cannot be run."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "laconic"\n')
    (tmp_path / "benchmarks").mkdir()
    for name, text in {"__init__": "", "echo": SOURCE, "echo_rank": SOURCE, "table": "X = 1\n"}.items():
        (tmp_path / "benchmarks" / f"{name}.py").write_text(text)
    (tmp_path / "inner").mkdir()
    return tmp_path


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_a_benchmark_gets_its_options_and_its_exit_code_is_told(repository: Path) -> None:
    command = [sys.executable, "-m", "laconic.cli.main", "bench", "echo", "--quick", "--out", "file"]
    told = subprocess.run(
        command, cwd=repository / "inner", capture_output=True, text=True, check=False, timeout=120
    )
    assert (told.stdout, told.stderr, told.returncode) == ("--quick --out file\n", "", 3)


def test_without_a_name_it_tells_which_there_are(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    result = bench()
    assert result.exit_code == 0
    assert result.stdout.split() == ["echo", "Says", "what", "it", "is", "told."]


def test_an_unknown_name_is_refused_with_those_there_are(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    result = bench("ecco", "--quick")
    assert (result.exit_code, result.stderr) == (2, "laconic: there is no benchmark 'ecco'; there are echo\n")


def test_outside_of_a_checkout_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\n')
    monkeypatch.chdir(tmp_path)
    result = bench("kernels")
    assert result.exit_code == 2
    assert "is in no checkout of Laconic" in result.stderr
    with pytest.raises(SpecError, match="get the repository"):
        checkout(tmp_path)


def test_the_repository_has_the_benchmarks_that_are_promised() -> None:
    found = benchmarks(checkout(Path(__file__).parent))
    assert found.keys() >= {"kernels", "steps", "predictions", "accuracy", "scaling"}
    assert all(found.values())
