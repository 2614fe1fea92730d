"""`laconic topology`: a table of facts, a picture that shows every message, and one line for bad input."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.unit.commands import invoke, one_line, table_of
from tests.unit.shared import for_each

import laconic
from laconic.tools.report.arrows import CENTRE, MIDDLE, RADIUS, Arc, bezier, place
from laconic.tools.report.topology_picture import MANY, picture

from .test_topologies import SPECS

SVG = "{http://www.w3.org/2000/svg}"


def drawn(spec: str, size: int, step: int | None = None) -> ElementTree.Element:
    return ElementTree.fromstring(picture(laconic.parse(spec), size, step))


def count(svg: ElementTree.Element, look: str) -> int:
    """Curves, or heads, in paths of this class."""
    paths = [path for path in svg.iter(f"{SVG}path") if look in path.get("class", "").split()]
    return sum(path.get("d", "").count("M") for path in paths)


def test_what_the_table_says() -> None:
    assert table_of("topology", "exponential()") == {
        "period": "4 steps",
        "sends": "1 message per rank and step",
        "regular": "yes: PushSum weights stay 1",
        "symmetric": "no: only for SGP, which pushes one way",
        "averages": "exactly, in 4 steps",
    }
    ring = table_of("topology", "ring", "--size", 64)
    assert ring["period"] == "1 step" and ring["symmetric"].startswith("yes")
    assert ring["averages"].endswith("0.997 of the disagreement in the long run: about 1,433 steps to 1%")
    row = table_of("topology", "linear()", "--size", 5)
    assert row["sends"] == "1 to 2 messages per rank and step" and row["regular"].startswith("no")
    assert table_of("topology", "random_matching()", "--size", 9)["period"] == "never repeats"


def test_a_picture_is_written(tmp_path: Path) -> None:
    result = invoke("topology", "bipartite_exponential()", "--size", 8, "-o", tmp_path / "t.svg", "--step", 2)
    assert result.exit_code == 0 and "t.svg" in result.stdout
    text = (tmp_path / "t.svg").read_text()
    assert text == picture(laconic.parse("bipartite_exponential()"), 8, 2)
    assert "prefers-color-scheme:dark" in text and "step 2, period 6" in text


@for_each(
    "arguments, words",
    [
        (("rong()",), "unknown name 'rong': did you mean ring?"),
        (("topk(0.1)",), "'topk(0.1)' is not a topology: give one such as exponential(), ring() or torus()"),
        (("3",), "'3' is not a topology"),
        (("ring()", "--size", 1), "the number of ranks must be a whole number of 2 or more"),
        (("ring()", "--size", 257), "--size must be at most 256, got 257"),
        (("ring()", "--step", -1), "--step must be a whole number of 0 or more"),
        (("torus(rows=3)",), "rows must divide the number of ranks, got rows=3 for 16 ranks"),
        (("bipartite_exponential()", "--size", 7), "even number of ranks, got 7"),
        (("graph(((0, 1), (2, 3)))", "--size", 4), "no path leads from rank 0 to rank 2"),
        (("ring()", "-o", "ring.png"), "--out must end in .svg, the only picture format, got ring.png"),
        (("ring()", "-o", "/nowhere/ring.svg"), "--out: there is no folder /nowhere; make it first"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: tuple[object, ...], words: str) -> None:
    one_line(invoke("topology", *arguments), words)


@for_each("spec", SPECS)
def test_a_picture_shows_every_message_once(spec: str) -> None:
    """Of one step: an arrowhead for each message that none comes back for, a line for each pair."""
    topology, size = laconic.parse(spec), 3 if "2, 0" in spec else 4 if spec.startswith("graph") else 8
    messages = {(rank, to) for rank in range(size) for to in topology.peers(rank, size, 1).out}
    svg = drawn(spec, size, 1)
    assert count(svg, "line") == len({frozenset(message) for message in messages})
    assert count(svg, "tip") == sum(message[::-1] not in messages for message in messages)
    assert [text.text for text in svg.iter(f"{SVG}text") if text.get("class") == "rank"] == [
        *map(str, range(size))
    ]


def test_all_steps_of_a_period_are_in_one_picture() -> None:
    svg = drawn("exponential()", 16)
    assert count(svg, "line") == 3 * 16 + 8 + 4  # at the last step it goes both ways; swatches
    assert [count(svg, f"s{shade}") for shade in range(5)] == [33, 33, 33, 9, 0]
    words = [text.text for text in svg.iter(f"{SVG}text")]
    assert "16 ranks, all 4 steps of a period" in words and "step 3" in words
    assert "a line without an arrowhead goes both ways" in words
    assert "64 ranks, the first 4 steps, never repeating" in picture(laconic.parse("random_matching()"), 64)


def test_in_a_crowd_the_messages_of_rank_0_are_bold() -> None:
    svg = drawn("exponential()", 64)
    assert (
        count(svg, "faint") > MANY
        and count(svg, "bold") == 6 + 5
        and "rank 0" in picture(laconic.parse("ring()"), 99)
    )
    assert count(drawn("exponential()", 8), "faint") == 0


def test_a_large_circle_numbers_every_eighth_rank() -> None:
    ranks = [text.text for text in drawn("ring()", 200).iter(f"{SVG}text") if text.get("class") == "rank"]
    assert ranks == [*map(str, range(0, 200, 8))]


@for_each("size", [2, 3, 4, 16, 64, 256])
def test_curves_stay_inside_the_circle_and_end_at_the_discs(size: int) -> None:
    for to in range(1, size):
        for head, again in ((False, 0), (True, 0), (True, 2)):
            start, bend, end = bezier(Arc(0, to, head, again), size, disc=1.0)
            assert start[1] > place(0, size)[1] - 2
            middle = [(a + 2 * b + c) / 4 for a, b, c in zip(start, bend, end, strict=True)]
            assert (middle[0] - MIDDLE) ** 2 + (middle[1] - CENTRE) ** 2 <= RADIUS**2 + 1
            assert sum((a - b) ** 2 for a, b in zip(end, place(to, size), strict=True)) == pytest.approx(
                3.5**2 if head else 2**2
            )


def test_a_long_spec_is_cut_in_the_heading_and_whole_in_the_title() -> None:
    spec = "graph(edges=(" + ", ".join(f"({i}, {i + 1})" for i in range(15)) + "))"
    svg = drawn(spec, 16)
    heading = next(text.text for text in svg.iter(f"{SVG}text") if text.get("class") == "head")
    assert heading is not None and re.fullmatch(r"graph\(edges=.*\.\.\.", heading) and len(heading) == 60
    assert spec in (svg.findtext(f"{SVG}title") or "")
