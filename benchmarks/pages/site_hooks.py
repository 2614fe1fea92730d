"""Hooks of the site's build: a page per name, links to these pages, a picture in the theme's colours.

mkdocs calls these functions by their names; mkdocs.yml names this file.
"""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from benchmarks.pages import names as name_pages
from benchmarks.pages.docstrings import ARXIV, LINKED

NAMES, REST = "Every method", "Measured"  # sections that are filled here
ALONE = ("choosing.md", "api.md")  # in their section: their room is for what they hold
SPEC = re.compile(r"^\| (?P<code>`(?P<name>\w+)(?:\([^|]*\))?`) \|")
DRAWN = re.compile(r'<img [^>]*src="(?P<file>gradient\.svg)"[^>]*>')  # in the theme's own colours


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add every name to the navigation, and every page that mkdocs.yml leaves out."""
    sections = {title: pages for section in config.nav or () for title, pages in section.items()}
    for title, named in groupby(name_pages.everything(), key=lambda name: name.section):
        sections[NAMES].append({title: [{name.name: name.src} for name in named]})
    placed = set(_placed(config.nav))
    left = sorted(path.name for path in Path(config.docs_dir).glob("*.md") if path.name not in placed)
    sections[REST].extend(left)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of names as files that exist only in memory."""
    for name in name_pages.everything():
        files.append(File.generated(config, name.src, content=name_pages.page(name)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Link papers, names and specs in tables; keep a figure and its error on one line."""
    if page.file.src_uri in ALONE:
        page.meta["hide"] = ["navigation"]
    known = {name.name for name in name_pages.everything()}

    def link(found: re.Match[str]) -> str:
        name = found["name"]
        return f"| [{found['code']}]({name_pages.FOLDER}/{name}.md) |" if name in known else found[0]

    def row(line: str) -> str:
        if not line.startswith("|"):
            return line
        whole = line.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
        if page.file.src_uri.startswith(f"{name_pages.FOLDER}/"):
            return whole
        return SPEC.sub(link, ARXIV.sub(LINKED, whole))

    return "\n".join(map(row, markdown.split("\n")))


def on_page_content(html: str, config: MkDocsConfig, **_: Any) -> str:
    """Inline a picture that uses the theme's colours, so that they apply to it."""

    def draw(found: re.Match[str]) -> str:
        picture = (Path(config.docs_dir) / found["file"]).read_text(encoding="utf-8")
        return f'<div class="scroll">{picture}</div>'

    return DRAWN.sub(draw, html)


def _placed(nav: Any) -> list[str]:
    """All paths in a navigation."""
    if isinstance(nav, str):
        return [nav]
    inside = nav.values() if isinstance(nav, dict) else nav
    return [path for each in inside for path in _placed(each)]
