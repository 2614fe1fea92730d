"""`laconic partition`: a table of sizes and labels, a picture with every example, one line for bad input."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from tests.unit.commands import invoke, one_line, table_of
from tests.unit.shared import for_each

import laconic
from laconic.tools.report.partition_picture import LEFT, LEVELS, MOST_CLIENTS, MOST_KINDS, across, picture
from laconic.tools.tasks import find

SVG = "{http://www.w3.org/2000/svg}"
LABELS = torch.arange(1000) % 5


def drawn(spec: str, clients: int, labels: torch.Tensor = LABELS) -> ElementTree.Element:
    return ElementTree.fromstring(picture(laconic.parse(spec).over(labels, clients), "made up"))


def path_of(svg: ElementTree.Element, look: str) -> str:
    """The path of this class; empty if there is none."""
    return next((path.get("d", "") for path in svg.iter(f"{SVG}path") if path.get("class") == look), "")


def test_what_the_table_says() -> None:
    assert table_of("partition", "digits", "--clients", 10) == {
        "clients": "10",
        "examples": "143 to 144 per client, median 144",
        "labels": "10 per client",
        "dealt": "all 1,437",
    }
    sparse = table_of("partition", "digits", "--clients", 10, "--by", "classes_per_client(2)")
    assert sparse["examples"] == "143 per client" and sparse["dealt"] == "all but 7 of 1,437"
    assert table_of("partition", "digits")["clients"] == "100"
    assert table_of("partition", "digits", "--by", "dirichlet(0.1)") != table_of(
        "partition", "digits", "--by", "dirichlet(0.1)", "--seed", 1
    )


def test_a_picture_is_written(tmp_path: Path) -> None:
    words = "partition digits --by label_shards() --clients 20 --seed 3"
    result = invoke(*words.split(), "-o", tmp_path / "p.svg")
    assert result.exit_code == 0 and "p.svg" in result.stdout
    task = find("digits")
    deal = laconic.parse("label_shards()").over(task.load(None)["train_y"], 20, 3)
    text = (tmp_path / "p.svg").read_text()
    assert text == picture(deal, task.title)
    assert "20 clients, 1,437 of 1,437 examples, seed 3" in text and "prefers-color-scheme:dark" in text


@for_each(
    "arguments, words",
    [
        (("digits", "--by", "dirichlett(1)"), "unknown name 'dirichlett': did you mean dirichlet"),
        (("digits", "--by", "topk(0.1)"), "'topk(0.1)' is not a partition: give one such as iid()"),
        (("digit",), "unknown task 'digit': did you mean digits?"),
        (("digits", "--clients", 0), "clients must be a whole number in 1..1437, got 0"),
        (("digits", "--clients", 1438), "clients must be a whole number in 1..1437, got 1438"),
        (("digits", "--by", "by_speaker()"), "by_speaker() divides by speaker, and digits has no speakers"),
        (("digits", "--by", "classes_per_client(11)"), "classes must be in 1..10"),
        (("digits", "--seed", -1), "seed must be a whole number"),
        (("digits", "-o", "deal.png"), "--out must end in .svg, the only picture format, got deal.png"),
        (("digits", "-o", "/nowhere/deal.svg"), "--out: there is no folder /nowhere; make it first"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: tuple[object, ...], words: str) -> None:
    one_line(invoke("partition", *arguments), words)


def test_a_text_is_dealt_to_its_speakers(tmp_path: Path) -> None:
    speech = "\n\n".join(f"{name}:\n{'so it is. ' * 40}" for name in ("ROMEO", "JULIET", "NURSE") * 4)
    (tmp_path / "input.txt").write_text(speech + "\n")
    table = table_of(
        "partition", "shakespeare", "--by", "by_speaker()", "--data", tmp_path, "-o", tmp_path / "s.svg"
    )
    assert table["clients"] == "3" and "parts" in table
    assert "parts of each client" in (tmp_path / "s.svg").read_text()


def test_a_bar_is_as_tall_as_its_client_has_examples() -> None:
    deal = laconic.parse("classes_per_client(1, gamma=0.5)").over(LABELS, 4)
    path = path_of(drawn("classes_per_client(1, gamma=0.5)", 4), "bar")
    heights = [float(height) for height in re.findall(r"v-([\d.]+)", path)]
    assert [height / heights[0] for height in heights] == pytest.approx(
        [size / deal.sizes[0] for size in deal.sizes], rel=0.01
    )


def test_every_kind_that_a_client_holds_is_a_cell_in_its_shade() -> None:
    for spec in ("iid()", "dirichlet(alpha=0.2)", "label_shards()"):
        counts = laconic.parse(spec).over(LABELS, 10).counts()
        shares = counts / counts.sum(1, keepdim=True)
        svg, below = drawn(spec, 10), 0.0
        for shade, most in enumerate(LEVELS):
            lefts = sorted(re.findall(r"M([\d.]+) ", path_of(svg, f"s{shade}")))
            held = ((shares > below) & (shares <= most)).nonzero()[:, 0].tolist()
            assert lefts == sorted(f"{LEFT + across(10)[0] * client:.2f}" for client in held), (spec, shade)
            below = most


def test_rows_bear_the_names_of_their_kinds() -> None:
    ticks = [text.text for text in drawn("iid()", 3, LABELS * 7 - 2).iter(f"{SVG}text")]
    assert {"-2", "5", "12", "19", "26"} <= set(ticks)


def test_a_crowd_is_shown_in_part_and_says_so() -> None:
    many = torch.arange(5000) % (MOST_KINDS + 40)
    svg = drawn("lda()", MOST_CLIENTS + 100, many)
    words = " ".join(text.text or "" for text in svg.iter(f"{SVG}text"))
    assert f"the first {MOST_CLIENTS} of {MOST_CLIENTS + 100}" in words
    assert f"{MOST_KINDS} of {MOST_KINDS + 40} labels" in words and "500 clients" in words
    assert path_of(svg, "bar").count("M") == MOST_CLIENTS
