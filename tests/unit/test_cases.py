"""Loops inside a law cover every pair, name the failing case, and run one case alone."""

from __future__ import annotations

import itertools
import sys

import pytest
from tests import cases
from tests.cases import case, covering, over

AXES = {"a": range(7), "b": range(3), "c": range(4)}


def test_every_pair_of_values_occurs() -> None:
    found = [*covering({name: [(str(i), i) for i in axis] for name, axis in AXES.items()})]
    assert len(found) == 7 * 4
    for one, other in itertools.combinations(AXES, 2):
        pairs = {(each[one][1], each[other][1]) for each in found}
        assert pairs == {*itertools.product(AXES[one], AXES[other])}


def test_a_failure_names_its_case_and_its_command() -> None:
    seen = []

    @over(spec=["topk(density=0.5)", "dense()"], size={"two": 2})
    def law(spec: str, size: int) -> None:
        seen.append(spec)
        with case(seed=9):
            assert spec == "dense()"

    with pytest.raises(AssertionError) as caught:
        law()
    assert seen == ["topk(density=0.5)", "dense()"], "the other cases run too"
    assert caught.value.case == "spec=topk(density=0.5), size=two, seed=9"
    if sys.version_info >= (3, 11):
        assert "--case 'spec=topk(density=0.5)' --case size=two --case seed=9" in caught.value.__notes__[0]


def test_only_the_chosen_cases_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    @over(size=(1, 2, 3), where=lambda size: size != 3)
    def law(size: int) -> None:
        seen.append(size)

    law()
    monkeypatch.setitem(cases.chosen, "size", "2")
    law()
    assert seen == [1, 2, 2]
    monkeypatch.setitem(cases.chosen, "size", "3")
    with pytest.raises(pytest.skip.Exception, match="no case is selected"):
        law()
