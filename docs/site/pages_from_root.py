"""MkDocs hook: pages from the repository's root, and guides that the navigation in mkdocs.yml does
not name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_LINK_INTO_DOCS = re.compile(r"\]\(docs/([^)]+)\)")
GUIDES = "How to"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put a guide that is not named in the navigation last among the others, under its own
    heading.
    """
    named = set(_pages_in(config.nav))
    guides = next(section[GUIDES] for section in config.nav if GUIDES in section)
    guides += sorted(
        page.name for page in Path(config.docs_dir).glob("*.md") if page.name not in named
    )
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add CHANGELOG.md and CONTRIBUTING.md, with links that hold from where they are on the
    site.
    """
    root = Path(config.config_file_path).parent
    for source, page in PAGES.items():
        text = _LINK_INTO_DOCS.sub(r"](\1)", (root / source).read_text(encoding="utf-8"))
        for other, other_page in PAGES.items():
            text = text.replace(f"]({other})", f"]({other_page})")
        files.append(File.generated(config, page, content=text))
    return files


def _pages_in(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages_in(part)
