"""What a release must have right: one version, a change for it, extras that bring what they say, an
open changelog.

``make release-check`` builds and installs what would be published; that takes minutes and the
network.
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
    assert '"version"' in re.search(r"^dynamic = (.*)$", pyproject, re.MULTILINE)[1]
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


def test_readme_reads_where_no_other_file_is() -> None:
    """What the build makes of it: every link has an address, below it stands a file of this
    repository.
    """
    tomllib = pytest.importorskip("tomllib")
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text = (ROOT / "README.md").read_text()
    for substitution in pyproject["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"][
        "substitutions"
    ]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    addresses = re.findall(r"\]\(([^)]+)\)", text)
    assert all(address.startswith(("https://", "#")) for address in addresses)
    repository = re.escape(pyproject["project"]["urls"]["Repository"])
    paths = [
        found[1]
        for address in addresses
        if (found := re.match(rf"{repository}/(?:blob|raw)/main/([^#]+)", address))
    ]
    assert len(paths) >= 10
    assert all((ROOT / path).exists() for path in paths)
    assert all(
        url.startswith(pyproject["project"]["urls"]["Repository"])
        for url in pyproject["project"]["urls"].values()
    )


def test_nothing_says_that_it_can_be_had_from_an_index() -> None:
    """Until it can, pip would fetch whatever somebody else has put there under this name."""
    texts = [
        path
        for room in ("src", "docs", "examples", "experiments", "conf")
        for path in (ROOT / room).rglob("*")
        if path.suffix in {".py", ".md", ".yaml", ".ipynb", ".sbatch"}
    ]
    texts += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    saying = re.compile(r"install ['\"]?lightning[-_]dct|lightning-dct\[")
    assert [str(path) for path in texts if saying.search(path.read_text())] == []


def test_the_release_workflow_publishes_without_a_secret_and_is_off() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    build = workflow["jobs"]["build"]
    publish = workflow["jobs"]["publish"]
    assert build["if"] == "vars.PUBLISH == 'true'"
    assert "make release-check" in [step.get("run") for step in build["steps"]]
    assert (publish["needs"], publish["permissions"]) == ("build", {"id-token": "write"})
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()


def test_the_sdist_takes_every_folder_that_is_ours() -> None:
    """What git tracks at the top, less what only this repository's own machinery reads."""
    tomllib = pytest.importorskip("tomllib")
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["sdist"]
    assert {"/src", "/tests", "/conf", "/experiments", "/examples", "/docs"} <= set(
        build["include"]
    )
    assert all((ROOT / entry.lstrip("/")).exists() for entry in build["include"])
