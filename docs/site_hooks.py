"""What happens while the site is built: a page for every registered name, and pictures that follow the theme.

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

from docs import name_pages

NAMES, REST = "Every method", "Measured"  # sections that are filled here
DRAWN = re.compile(r'<img [^>]*src="[./]*(?P<file>[\w-]+\.svg)"[^>]*>')
INLINE = {"gradient.svg"}  # drawn in the theme's own colours: part of the page


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Every name has a place in the navigation, and every page that mkdocs.yml gives none."""
    sections = {title: pages for section in config.nav or () for title, pages in section.items()}
    for title, named in groupby(name_pages.everything(), key=lambda name: name.section):
        sections[NAMES].append({title: [{name.name: name.src} for name in named]})
    placed = set(_placed(config.nav))
    left = sorted(path.name for path in Path(config.docs_dir).glob("*.md") if path.name not in placed)
    sections[REST].extend(left)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages of names are files like others, that are nowhere on disk."""
    for name in name_pages.everything():
        files.append(File.generated(config, name.src, content=name_pages.page(name)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """In the list of all names each leads to its page, and in the tables of figures each spec."""
    if page.file.src_uri.startswith(f"{name_pages.FOLDER}/"):
        return markdown
    known = {name.name for name in name_pages.everything()}

    def link(found: re.Match[str]) -> str:
        name = found["name"]
        return f"| [{found['code']}]({name_pages.FOLDER}/{name}.md) |" if name in known else found[0]

    return re.sub(r"^\| (?P<code>`(?P<name>\w+)(?:\([^|]*\))?`) \|", link, markdown, flags=re.MULTILINE)


def on_page_content(html: str, config: MkDocsConfig, **_: Any) -> str:
    """A picture that has the theme's colours stands in the page, where they reach it."""

    def draw(found: re.Match[str]) -> str:
        if found["file"] not in INLINE:
            return found[0]
        return (Path(config.docs_dir) / found["file"]).read_text(encoding="utf-8")

    return DRAWN.sub(draw, html)


def _placed(nav: Any) -> list[str]:
    """All paths in a navigation."""
    if isinstance(nav, str):
        return [nav]
    inside = nav.values() if isinstance(nav, dict) else nav
    return [path for each in inside for path in _placed(each)]
