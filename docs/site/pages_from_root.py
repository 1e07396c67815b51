"""MkDocs hook: CHANGELOG.md and CONTRIBUTING.md lie in the root of the repository and are pages of the site too."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_LINK_INTO_DOCS = re.compile(r"\]\(docs/([^)]+)\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages, with links that hold from where they are now."""
    root = Path(config.config_file_path).parent
    for source, page in PAGES.items():
        text = _LINK_INTO_DOCS.sub(r"](\1)", (root / source).read_text(encoding="utf-8"))
        for other, other_page in PAGES.items():
            text = text.replace(f"]({other})", f"]({other_page})")
        files.append(File.generated(config, page, content=text))
    return files
