"""MkDocs hook: ``<!-- help of every command -->`` becomes what ``lightning-dct COMMAND --help``
prints.
"""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

MARK = "<!-- help of every command -->"
COLUMNS = "84"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill the mark in."""
    return markdown.replace(MARK, help_of_all()) if MARK in markdown else markdown


def help_of_all() -> str:
    """A heading and the help of each command."""
    from lightning_dct.commands import COMMANDS, main

    parts = []
    for name in COMMANDS:
        printed = io.StringIO()
        before = os.environ.get("COLUMNS")
        os.environ["COLUMNS"] = COLUMNS
        try:
            with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
                main([name, "--help"])
        finally:
            os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
        parts.append(f"## {name}\n\n```text\n{printed.getvalue().rstrip()}\n```\n")
    return "\n".join(parts)
