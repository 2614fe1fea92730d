"""Every number in README.md and docs/ is what its file says."""

from __future__ import annotations

import re

from benchmarks.pages.write import BLOCKS, PAGES, ROOT, WHOLE, filled
from tests.unit.shared import for_each
from torch.distributed.run import parse_args

import laconic
from laconic.tools.cli.run import torchrun_arguments


@for_each("page", PAGES)
def test_blocks_are_what_their_files_say(page) -> None:  # type: ignore[no-untyped-def]
    text = page.read_text()
    assert set(re.findall(r"<!-- (\w+) -->", text)) <= BLOCKS.keys()
    assert filled(text) == text, "run `make docs`"


def test_every_block_is_on_a_page() -> None:
    shown = {name for page in PAGES for name in re.findall(r"<!-- (\w+) -->", page.read_text())}
    assert shown == BLOCKS.keys()


@for_each("page", WHOLE)
def test_whole_pages_are_what_their_files_say(page) -> None:  # type: ignore[no-untyped-def]
    assert page.read_text() == WHOLE[page](), "run `make docs`"


def test_pages_that_readme_links_are_there() -> None:
    page = PAGES[0]
    linked = re.findall(r"\]\(([\w./-]+)\)", page.read_text())
    assert linked
    assert not [link for link in linked if not (page.parent / link).exists()]


def test_readme_is_short_and_its_specs_are_specs() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 115
    python = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    specs = re.findall(r'"(\w+\([^"]*\))"', python)
    assert len(specs) >= 3
    for spec in specs:
        assert laconic.parse(spec) is not None


def test_benchmarks_that_pages_name_can_be_run() -> None:
    pages = (*PAGES, *(ROOT / "docs").glob("*.md"), ROOT / "Makefile", ROOT / "CONTRIBUTING.md")
    named = {name for page in pages for name in re.findall(r"-m\s+(benchmarks\.[\w.]+\w)", page.read_text())}
    assert {"benchmarks.kernels", "benchmarks.steps", "benchmarks.pages.write"} <= named
    for name in named:
        path = ROOT / name.replace(".", "/")
        text = (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        assert 'if __name__ == "__main__":' in text, name


def test_torchrun_takes_the_commands_of_the_page_of_four_machines() -> None:
    text = (ROOT / "docs" / "four_machines.md").read_text()
    launched = re.findall(r"^(torchrun|laconic run) (.*)$", text, re.MULTILINE)
    assert len(launched) == 3
    for tool, words in launched:
        given = words.split() if tool == "torchrun" else torchrun_arguments(words.split())
        found = parse_args(given)
        assert (found.nnodes, found.node_rank, found.standalone) == ("4", 0, False)
        assert found.master_addr == "192.168.1.10"
    assert "GLOO_SOCKET_IFNAME" in text and "ufw" in text
