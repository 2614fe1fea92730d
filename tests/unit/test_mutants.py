"""The mutants fit the sources as they are, so that the nightly lane can seed them."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.mutants.related import related
from tests.mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]
PACKAGES = """core kernels codecs feedback comm reducers exchange optim lowbit ddp sparsity activations admm
recipes pipeline strategies federated replicator methods tools/plan tools/tasks tools/cli"""


def test_every_mutant_applies_once_and_parses() -> None:
    for mutant in MUTANTS:
        text = (ROOT / "src" / "laconic" / mutant.file).read_text()
        assert text.count(mutant.old) == 1, f"{mutant.name}: old text occurs {text.count(mutant.old)} times"
        assert mutant.new != mutant.old, mutant.name
        if not mutant.native:
            ast.parse(text.replace(mutant.old, mutant.new), mutant.file)


def test_mutants_are_in_all_packages_and_in_native_code() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 30
    assert not [each for each in PACKAGES.split() if not any(m.file.startswith(f"{each}/") for m in MUTANTS)]
    assert sum(mutant.native for mutant in MUTANTS) >= 4


def test_every_mutant_has_related_tests() -> None:
    for mutant in MUTANTS:
        files = related(ROOT, mutant)
        assert any(name.startswith("tests/") for name in files), mutant.name
        assert any([*ROOT.glob(hint)] for hint in mutant.hints), f"{mutant.name}: no hint matches a file"
