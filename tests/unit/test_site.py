"""The site builds without a warning, has a page for every name, loads nothing from elsewhere, and runs."""

from __future__ import annotations

import doctest
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
import torch.distributed as dist
from benchmarks.common import tables
from benchmarks.pages import docstrings, situations
from benchmarks.pages import names as name_pages
from tests.unit.shared import for_each
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.spec import names

pytest.importorskip("mkdocs", reason="mkdocs-material is not installed")
ROOT = Path(__file__).parents[2]
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Pages whose Python runs.
PAGES = (
    "index",
    "quick_start",
    "how_it_works",
    "faults",
    "pipelines",
    "sparse_training",
    "low_bit",
    "admm",
    "writing_a_codec",
    "partitions",
)


class Read(HTMLParser):
    """What a page loads, where it leads, and which places it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        self.ids |= {found[key] for key in ("id", "name") if key in found}
        if found.get(LOADS.get(tag, "")):
            self.loads.append(found[LOADS[tag]])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Read]:
    """Every page by its path in the site, which is built anew."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    pages = folder.rglob("*.html")
    return {path.relative_to(folder).as_posix(): Read(path.read_text("utf-8")) for path in pages}


@pytest.mark.nightly
def test_every_registered_name_has_a_page_that_the_list_leads_to(site: dict[str, Read]) -> None:
    pages = {f"names/{name}.html" for name in names()}
    assert pages <= site.keys()
    assert pages <= set(site["methods.html"].links)


@pytest.mark.nightly
def test_nothing_is_loaded_from_elsewhere(site: dict[str, Read]) -> None:
    for path, page in site.items():
        assert page.loads, path
        assert not [url for url in page.loads if urlsplit(url).netloc], path


@pytest.mark.nightly
def test_links_lead_to_places_that_are_there(site: dict[str, Read]) -> None:
    for path, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if path == "404.html" or parts.scheme or parts.netloc:
                continue
            target = os.path.normpath(Path(path).parent / unquote(parts.path)) if parts.path else path
            assert target in site or target == ".", f"{path} leads to {link}"
            place = unquote(parts.fragment)
            assert not place or place in site[target].ids, f"{path} leads to {link}, which has no such place"


def test_docstrings_become_words_drawings_and_examples() -> None:
    text = (
        "One of\ntwo `a_b`:\n\n    y = x_i\n\n    z\n\n- first\n  item\n- next <\n\n>>> 1 + 1\n2\n\n"
        "End.\nWire: n. Error: 0.\n\n"
        "Args:\n    a: One,\n        two_.\n    **b: Three.\n\nReturns:\n    A sum."
    )
    assert docstrings.markdown(text).split("\n\n") == [
        "One of two `a_b`:",
        "```text\ny = x_i",
        "z\n```",
        "- first item\n- next &lt;",
        "```pycon\n>>> 1 + 1\n2\n```",
        "End.",
        "**Wire**: n. **Error**: 0.",
        "| Args |  |\n|---|---|\n| `a` | One, two\\_. |\n| `**b` | Three. |",
        "**Returns**: A sum.",
    ]


def test_a_page_tells_paper_call_equation_and_figures() -> None:
    pages = {name.name: name_pages.page(name) for name in name_pages.everything()}
    assert pages.keys() == set(names())
    for said in (
        "[arXiv:1712.01887](https://arxiv.org/abs/1712.01887)",
        "u = mu * u + g ",
        "warmup_steps=0,\n",
        "| `dgc()` |",
        "| cifar10 | 4 | `dgc(density=0.01, warmup_steps=100)` |",
        "(../choosing.md#100-mbits-and-less)",
    ):
        assert said in pages["dgc"], said
    assert "**Needs**: laconic.optim.AMSGrad" in pages["comp_ams"]
    assert "## Measured: many workers" in pages["deft"]
    assert 'laconic.distribute(model, optimizer, "sgp()")' in pages["sgp"]


def test_calls_on_pages_of_names_are_specs() -> None:
    for name in name_pages.everything():
        (call,) = CODE.findall(name_pages.page(name))
        spec = re.findall(r'"(.*?)"', call)[-1]  # a command may name a method before it
        assert laconic.parse(spec) is not None


@pytest.mark.nightly
def test_situations_are_places_of_their_page(site: dict[str, Read]) -> None:
    for situation in situations.SITUATIONS:
        assert situations.anchor(situation.title) in site["choosing.html"].ids


@for_each("module", [docstrings, situations, tables])
def test_examples_of_what_writes_the_pages(module: Any) -> None:
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Names that pages take as given, in a training of one rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for key, value in told.items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    try:
        yield {
            "torch": torch,
            "laconic": laconic,
            "F": F,
            "DistributedDataParallel": DistributedDataParallel,
            "Net": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
            "batch": torch.randn(4, 8),
            "__name__": "a page",
        }
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page: str, stage: dict[str, Any]) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    blocks = CODE.findall(text)
    assert blocks
    if "init_process_group" not in text:
        dist.init_process_group("gloo")
    for nth, block in enumerate(blocks):
        exec(compile(block, f"{page}.md, block {nth}", "exec", dont_inherit=True), stage)
