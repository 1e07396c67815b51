"""Griffe extension: docstrings name things as Sphinx does, ``:class:`lightning_dct.DCTConfig```;
pages are Markdown.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

API = Path(__file__).resolve().parents[1] / "api"
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`(~?)([\w.]+)`")
_ON_A_PAGE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
# A paragraph that ends in two colons: what is indented below it is code.
_LITERAL = re.compile(r"^( *)(.*\S)::$", re.MULTILINE)


class DocstringRoles(griffe.Extension):
    """Rewrites every docstring before it is parsed.

    Names that have a place in the reference become links to it.
    """

    def __init__(self) -> None:
        pages = "\n".join(page.read_text(encoding="utf-8") for page in API.glob("*.md"))
        self._known = {path.rpartition(".")[2]: path for path in _ON_A_PAGE.findall(pages)}

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = self.to_markdown(obj.docstring.value)

    def to_markdown(self, text: str) -> str:
        """One docstring."""
        return _LITERAL.sub(_introduce, _ROLE.sub(self._name, text))

    def _name(self, role: re.Match[str]) -> str:
        short = role[2].rpartition(".")[2]
        shown = f"`{short if role[1] else role[2]}`"
        path = self._known.get(short)
        return (
            shown
            if path is None or not role[2].startswith("lightning_dct.")
            else f"[{shown}][{path}]"
        )


def _introduce(line: re.Match[str]) -> str:
    """The line above some code. A lone word with a colon would begin a section of the docstring."""
    return f"{line[1]}**{line[2]}**" if line[2].isalpha() else f"{line[1]}{line[2]}:"
