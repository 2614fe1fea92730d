"""Lets the page of the API read docstrings as `docs.docstrings` does; mkdocs.yml names this file."""

from __future__ import annotations

import inspect
from typing import Any

import griffe

from docs.docstrings import markdown


class PlainText(griffe.Extension):
    """Turns every docstring into Markdown before it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(inspect.cleandoc(obj.docstring.value))
