"""Docstrings as the site shows them: roles and examples become Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|attr|mod|data):`~?([^`]+)`")
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
INTRODUCED = re.compile(r"::$", re.MULTILINE)


class Markdown(griffe.Extension):
    """Rewrites docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one."""
        if obj.docstring:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            text = EXAMPLE.sub(r"```pycon\n\g<0>\n```", text)
            obj.docstring.value = INTRODUCED.sub(":", text)
