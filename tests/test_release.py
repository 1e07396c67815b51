"""What a release must have right: one version, a change for it, extras that bring what they say, an open changelog.

``make release-check`` builds and installs what would be published; that takes minutes and the network.
"""

import re
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import lightning_dct
from lightning_dct.commands import main
from release_check import BASE, requirements

ROOT = Path(__file__).parents[1]


def test_the_version_comes_from_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: ``__about__.py``, which hatch reads and the citation repeats."""
    version = lightning_dct.__version__
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in pyproject
    assert 'path = "src/lightning_dct/__about__.py"' in pyproject
    assert not re.search(r"^version =", pyproject, re.MULTILINE)
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"{version}\n"


def test_the_changelog_has_an_entry_for_what_is_there() -> None:
    """The first section is of this version, or unreleased, and says something."""
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    heading, _, body = sections[0].partition("\n")
    assert heading.startswith((lightning_dct.__version__, "Unreleased"))
    assert len(re.findall(r"^- \S", body, re.MULTILINE)) > 0
    assert any(section.startswith(lightning_dct.__version__) for section in sections)


def test_each_extra_adds_what_it_names_and_no_more() -> None:
    """Oracle: pyproject.toml, line by line, against what pip sees of the installed package."""
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    by_extra: dict[str | None, set[str]] = {}
    for name, extra in requirements(metadata.metadata("lightning-dct")):
        by_extra.setdefault(extra, set()).add(name)
    assert by_extra.pop(None) == BASE
    named = {
        extra: {re.match(r"[\w-]+", line)[0] for line in lines}
        for extra, lines in project["optional-dependencies"].items()
    }
    assert by_extra == named
    assert not any(names & BASE for names in named.values())


def test_the_sdist_takes_every_folder_that_is_ours() -> None:
    """What git tracks at the top, less what only this repository's own machinery reads."""
    tomllib = pytest.importorskip("tomllib")
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    assert {"/src", "/tests", "/conf", "/experiments", "/examples", "/docs"} <= set(build["include"])
    assert all((ROOT / entry.lstrip("/")).exists() for entry in build["include"])
