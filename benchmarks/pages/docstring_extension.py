"""Makes the API page read docstrings like `benchmarks.pages.docstrings`; mkdocs.yml names this file."""

from __future__ import annotations

import inspect
from typing import Any

import griffe

from benchmarks.pages.docstrings import markdown, section_google


class PlainText(griffe.Extension):
    """Turns every docstring into Markdown before it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(inspect.cleandoc(obj.docstring.value), section=section_google)
