"""Who speaks in a text: every window has the speaker of most of its letters, and can be dealt to them."""

from __future__ import annotations

import torch
from tests.unit.shared import refuses
from torch import Tensor

import laconic
from laconic.core.errors import DataError, SpecError
from laconic.tools.tasks import TASKS, find
from laconic.tools.tasks.shakespeare import WINDOW, speakers, windows


def text_of(*speeches: tuple[str, int]) -> Tensor:
    """A text of speeches: names, and how many letters each says."""
    text = "\n\n".join(f"{name}:\n{'so: ' * (letters // 4)}" for name, letters in speeches)
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def plain(letters: Tensor) -> list[str]:
    """The speaker of every window, letter by letter."""
    said, now = [], ""
    lines = bytes(letters.tolist()).decode().split("\n")
    for place, line in enumerate(lines):
        if line.endswith(":") and line.count(":") == 1 and (place == 0 or not lines[place - 1]):
            now = line
        said += [now] * (len(line) + 1)
    found = []
    for start in range(0, (len(letters) - 1) // WINDOW * WINDOW, WINDOW):
        window = said[start : start + WINDOW]
        found.append(max(dict.fromkeys(said), key=window.count))
    return found


def test_a_window_is_of_who_speaks_most_of_it() -> None:
    letters = text_of(("ROMEO", 400), ("JULIET", 100), ("ROMEO", 40), ("First Nurse", 300), ("JULIET", 200))
    x, _ = windows(letters)
    found, expected = speakers(x).tolist(), plain(letters)
    names = list(dict.fromkeys(expected))
    assert names == ["ROMEO:", "JULIET:", "First Nurse:"]
    assert found == [names.index(name) for name in expected]


def test_lines_that_are_no_names() -> None:
    """A colon without a blank line before, a text before the first name, and a text without names."""
    for text, expected in (
        ("A:\nhear me\nCome:\n" + "x" * 200 + "\n\nB:\n" + "y" * 200, [0, 0, 0, 1, 1, 1]),
        ("x" * 100 + "\n\nA:\n" + "y" * 100, None),
    ):
        x, _ = windows(torch.tensor(list(text.encode()), dtype=torch.uint8))
        assert speakers(x).tolist() == (expected or [0] * len(x))
    words = "no speakers: each speech must begin with a line NAME:"
    refuses(DataError, words, speakers, torch.full((9, WINDOW), 65, dtype=torch.uint8))
    for name in TASKS:
        if name != "shakespeare":
            words = rf"by_speaker\(\) divides by speaker, and {name} has no speakers"
            refuses(SpecError, words, find(name).kinds_for, laconic.parse("by_speaker()"), {})


def test_clients_are_speakers() -> None:
    letters = text_of(("A", 400), ("B", 100), ("C", 40), ("D", 300), ("A", 200))
    x, y = windows(letters)
    task, rule = find("shakespeare"), laconic.parse("by_speaker(least=2)")
    kinds = task.kinds_for(rule, {"train_x": x, "train_y": y})
    shares = rule.deal(kinds)
    assert [len(kinds[share].unique()) for share in shares] == [1] * len(shares)
    assert min(map(len, shares)) >= 2
    assert torch.equal(task.kinds_for(laconic.parse("iid()"), {"train_x": x, "train_y": y}), task.kinds(y))
