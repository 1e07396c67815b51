"""The page and the command: all runs are in it, its HTML is sound, and it needs nothing beside it."""

import os
import re
import sys
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest

from lightning_dct.commands import main
from made_up_runs import rows_of, write_csv, write_train_run

VOID = {"meta", "link", "input", "br", "wbr", "hr", "img"}
NAMES = ("dct", 'a <b> & "c"', "plain")


class Page(HTMLParser):
    """Checks that every element is closed in its turn, and gathers names, texts and addresses."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.identities: list[str] = []
        self.used: set[str] = set()
        self.addresses: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        for name, value in attrs:
            self.identities += [value] if name == "id" else []
            self.addresses += [value] if name in ("src", "href", "xlink:href") else []
            self.addresses += re.findall(r"url\((.*?)\)", value or "")
            self.used |= set((value or "").split()) if name in ("aria-labelledby", "for") else set()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    write_csv(folder / "dct", rows_of(8.0), "density: 0.03\n")
    write_csv(folder / "second", rows_of(4.0, inside=True), "density: 0.1\n")
    write_csv(folder / "plain", rows_of(None))
    output = folder / "made" / "report.html"
    words = [str(folder / "dct"), f"{NAMES[1]}={folder / 'second'}", str(folder / "plain"), str(folder / "nowhere")]
    assert main(["report", *words, "--output", str(output), "--title", "Ours & theirs"]) == 1
    assert [file.name for file in output.parent.iterdir()] == ["report.html"]
    return output.read_text()


def test_the_html_is_sound(made):
    page = Page(made)
    assert len(page.identities) == len(set(page.identities))
    within = {address.removeprefix("#") for address in page.addresses if address.startswith("#")}
    assert page.used | within <= set(page.identities)
    assert page.elements[0][1] == {"lang": "en"}


def test_nothing_is_fetched(made):
    page = Page(made)
    assert {address.partition(":")[0] if ":" in address else address[0] for address in page.addresses} <= {"#", "data"}
    assert "https:" not in made
    assert "@import" not in made
    assert not [tag for tag, _ in page.elements if tag in ("script", "img", "iframe", "object", "embed")]


def test_all_runs_are_in_it_and_what_could_not_be_read(made):
    page = Page(made)
    for name in NAMES:
        assert page.texts.count(name) >= 3  # totals, key, settings or charts
    assert "Not everything could be read: 1 problem" in page.texts
    assert [text for text in page.texts if text.endswith("nowhere: no such folder")]
    assert page.texts.count("Ours & theirs") == 2


def test_every_chart_has_a_name_for_those_who_do_not_see_it(made):
    labels = [attributes["aria-label"] for tag, attributes in Page(made).elements if attributes.get("role") == "img"]
    assert len(set(labels)) == 15
    assert "val/loss against bytes sent, lower is better" in labels


def test_tables_have_heads_for_rows_and_columns(made):
    scopes = [attributes.get("scope") for tag, attributes in Page(made).elements if tag == "th"]
    assert scopes.count("row") >= len(NAMES)
    assert set(scopes) == {"row", "col"}


def test_colours_are_read_on_both_backgrounds():
    css = resources.files("lightning_dct.report").joinpath("page.css").read_text()
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", css, re.S)
    )
    assert light.keys() == dark.keys()
    for colours in (light, dark):
        for background in ("page", "card"):
            for name, least in [("ink", 7), ("muted", 4.5), ("warn", 4.5), *((f"run-{i}", 3.0) for i in range(8))]:
                assert contrast(colours[name], colours[background]) >= least, name


def contrast(one, other):
    """As WCAG 2 defines it."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_metric_that_was_not_logged_is_an_error_that_names_those_that_were(tmp_path, capsys):
    run = write_train_run(tmp_path / "run", rows_of(8.0), ["strategy.density=0.03"])
    output = tmp_path / "report.html"
    assert main(["report", str(run), "--output", str(output), "--metric", "val/auc"]) == 1
    assert "val/loss" in capsys.readouterr().err
    assert not output.exists()
    assert main(["report", str(run), "--output", str(output), "--metric", "test/loss"]) == 0
    assert "test/loss against steps, lower is better" in output.read_text()


def test_without_any_run_there_is_no_page(tmp_path, capsys):
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "report.html")]) == 1
    assert str(tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_a_missing_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for module in ("page", "charts"):
        monkeypatch.delitem(sys.modules, f"lightning_dct.report.{module}", raising=False)
    assert main(["report", str(tmp_path)]) == 1
    assert "'matplotlib' is missing: pip install '.[experiments]' in a clone" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(tmp_path, monkeypatch):
    """Oracle: an error of the kind that misuse has, where no user can cause it."""

    def fail(*_):
        raise ValueError("a bug")

    monkeypatch.setattr("lightning_dct.report.page.make_page", fail)
    with pytest.raises(ValueError, match="a bug"):
        main(["report", str(write_csv(tmp_path / "run", rows_of(8.0))), "--output", str(tmp_path / "report.html")])


def test_a_page_replaces_a_page_and_nothing_else(tmp_path, capsys):
    """Oracle: one line that names the argument, and what was there is there still."""
    run = write_csv(tmp_path / "run", rows_of(8.0))
    log = run / "metrics.csv"
    before = log.read_bytes()
    page = tmp_path / "report.html"
    for output in (log, run, log / "report.html"):
        assert main(["report", str(run), "--output", str(output)]) == 1
        complaint = capsys.readouterr().err
        assert complaint.startswith(f"lightning-dct report: --output {output}: ")
        assert complaint.count("\n") == 1
    assert log.read_bytes() == before
    for _ in range(2):
        assert main(["report", str(run), "--output", str(page)]) == 0


def test_long_names_break_where_a_reader_would(tmp_path):
    name = "strategy.density=0.013 data/long_folder"
    write_csv(tmp_path / "run", rows_of(8.0), "strategy:\n  warmup_steps: 3\n")
    output = tmp_path / "report.html"
    assert main(["report", f"{name}={tmp_path / 'run'}", "--output", str(output)]) == 0
    assert "strategy.<wbr>density=<wbr>0.013 data/<wbr>long_<wbr>folder" in output.read_text()
    assert "strategy.<wbr>warmup_<wbr>steps" in output.read_text()


@pytest.mark.parametrize("last", ["nan", "inf"])
def test_a_time_that_is_not_finite_leaves_the_page_of_all_runs(tmp_path, capsys, last):
    good = write_csv(tmp_path / "good", rows_of(8.0))
    bad = write_csv(tmp_path / "bad", [*rows_of(8.0)[:-1], {"step": 60, "val/loss": 2.0, "dct/seconds": last}])
    output = tmp_path / "report.html"
    assert main(["report", str(good), str(bad), "--output", str(output)]) == 0
    assert f"{bad / 'metrics.csv'}: dct/seconds: values that are not finite, left out: 1" in capsys.readouterr().err
    assert Page(output.read_text()).texts.count("0:30") == 4  # of both runs in both tables


@pytest.mark.skipif(sys.platform == "darwin", reason="its file names are UTF-8")
def test_bytes_that_are_not_utf8_are_replaced(tmp_path, capsys):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff")
    write_csv(Path(folder), rows_of(8.0))
    output = tmp_path / "report.html"
    assert main(["report", folder, "--output", str(output), "--title", "Ours\udcff"]) == 0
    page = Page(output.read_text(encoding="utf-8"))
    assert page.texts.count("Ours?") == 2
    assert [text for text in page.texts if text.endswith("bad?/metrics.csv")]
