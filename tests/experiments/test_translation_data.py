import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from nlp.data import IGNORED
from nlp.parallel_text import (
    Pair,
    drop_accelerators,
    find_catalogs,
    read_aligned,
    read_catalog,
    read_catalogs,
)
from nlp.translation_data import BOS, EOS, FIRST_TOKEN, PAD, ParallelText, clean_pairs, split_pairs

HEADER = "Content-Type: text/plain; charset=UTF-8\nPlural-Forms: nplurals=2; plural=(n != 1);\n"


def write_catalog(file: Path, messages: dict[str, str], encoding: str = "utf-8") -> Path:
    """Write a .mo file as the gettext manual describes it."""
    entries = sorted({"": HEADER, **messages}.items())
    keys, values = (
        [text.encode(encoding) for text in column] for column in zip(*entries, strict=True)
    )
    count = len(entries)
    content = b""
    tables = []
    for texts in (keys, values):
        table = b""
        for text in texts:
            table += struct.pack("<II", len(text), 28 + 16 * count + len(content))
            content += text + b"\0"
        tables.append(table)
    head = struct.pack("<7I", 0x950412DE, 0, count, 28, 28 + 8 * count, 0, 28 + 16 * count)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(head + b"".join(tables) + content)
    return file


def write_lines(folder: Path) -> dict[str, str]:
    """Two aligned files: numbers in digits and in words."""
    words = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
    numbers = [str(number) for number in range(100, 500)]
    texts = {
        "source": numbers,
        "target": [" ".join(words[int(digit)] for digit in number) for number in numbers],
    }
    for setting, lines in texts.items():
        (folder / setting).write_text("\n".join(lines) + "\n")
    return {setting: str(folder / setting) for setting in texts}


def make_data(folder: Path, **settings: object) -> ParallelText:
    defaults = {
        "vocabulary_size": 300,
        "source_length": 8,
        "target_length": 24,
        "cache_dir": str(folder / "cache"),
    }
    return ParallelText(
        **{**write_lines(folder), **defaults, "batch_size": 4, "eval_batch_size": 16, **settings}
    )


def test_a_catalog_gives_its_messages_and_no_header(tmp_path: Path) -> None:
    messages = {
        "Open": "Öffnen",
        "%d file\0%d files": "%d Datei\0%d Dateien",
        "menu\x04Close": "Schließen",
        "_Save": "S_peichern",
        "Untranslated": "",
    }
    pairs = read_catalog(write_catalog(tmp_path / "x.mo", messages))
    assert sorted(pairs) == [
        ("%d file", "%d Datei"),
        ("Close", "Schließen"),
        ("Open", "Öffnen"),
        ("Save", "Speichern"),
        ("Untranslated", ""),
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("E~xit", "B~eenden"), ("Exit", "Beenden")),
        (("Save &As…", "Speichern &unter…"), ("Save As…", "Speichern unter…")),
        (("_File", "文件(_F)"), ("File", "文件")),
        (
            ("In %(file_name)s.", "%(file_name)s, dort"),
            ("In %(file_name)s.", "%(file_name)s, dort"),
        ),
        (("Black & white", "Schwarz & weiß"), ("Black & white", "Schwarz & weiß")),
        (("A &amp; B", "A &amp; B"), ("A &amp; B", "A &amp; B")),
        (("__init__ of x", "__init__ von x"), ("__init__ of x", "__init__ von x")),
    ],
)
def test_accelerators_go_and_names_stay(before: tuple[str, str], after: tuple[str, str]) -> None:
    assert drop_accelerators(Pair(*before)) == after


def test_a_folder_gives_the_catalogs_of_one_language(tmp_path: Path) -> None:
    german = write_catalog(tmp_path / "all" / "de" / "LC_MESSAGES" / "x.mo", {"yes": "ja"})
    french = write_catalog(tmp_path / "all" / "fr" / "LC_MESSAGES" / "x.mo", {"yes": "oui"})
    assert find_catalogs(tmp_path / "all", "de") == [german]
    assert find_catalogs(tmp_path / "all" / "fr", "fr") == [french]
    assert find_catalogs(tmp_path / "all", None) == [german, french]
    assert find_catalogs(french, "de") == [french]
    with pytest.raises(
        FileNotFoundError, match=r"data\.catalogs=.*'es' \(data\.language\); there are de, fr"
    ):
        find_catalogs(tmp_path / "all", "es")
    with pytest.raises(FileNotFoundError, match=r"data\.catalogs=.*nothing"):
        find_catalogs(tmp_path / "nothing", "de")


def test_a_broken_catalog_is_named(tmp_path: Path) -> None:
    good = write_catalog(tmp_path / "good.mo", {"yes": "ja"})
    latin = write_catalog(tmp_path / "latin.mo", {"yes": "schön"}, encoding="latin-1")
    with pytest.raises(ValueError, match=r"latin\.mo cannot be read"):
        read_catalog(latin)
    with pytest.warns(UserWarning, match=r"left out: .*latin\.mo"):
        assert read_catalogs([good, latin]) == [("yes", "ja")]
    # Wherever a file ends or goes wrong, the error is one that names it.
    whole = good.read_bytes()
    for end in range(len(whole) - 1):
        (tmp_path / "cut.mo").write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"cut\.mo cannot be read"):
            read_catalog(tmp_path / "cut.mo")


def test_lines_belong_together(tmp_path: Path) -> None:
    source = tmp_path / "a.en"
    target = tmp_path / "a.de"
    source.write_bytes(b"one\x0cstill\x07 one\r\n\ntwo\n")
    target.write_bytes(b"eins\n\nzwei")
    pairs = read_aligned(source, target)
    assert pairs == [("one\x0cstill\x07 one\r", "eins"), ("", ""), ("two", "zwei")]
    assert clean_pairs([*pairs, pairs[0]]) == (
        [("one still one", "eins"), ("two", "zwei")],
        {"empty": 1, "repeated": 1},
    )


def test_file_errors_name_the_setting(tmp_path: Path) -> None:
    files = write_lines(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"data\.target=.*nothing"):
        ParallelText(**{**files, "target": str(tmp_path / "nothing")})
    short = tmp_path / "short"
    short.write_text("eins\nzwei\n")
    with pytest.raises(ValueError, match=r"data\.source=.*400 lines and data\.target=.*has 2"):
        ParallelText(**{**files, "target": str(short)})
    short.write_bytes(b"sch\xf6n\n")
    with pytest.raises(ValueError, match=r"data\.target=.*not UTF-8 \(byte 3\).*iconv"):
        ParallelText(**{**files, "target": str(short)})
    with pytest.raises(ValueError, match="both files or neither"):
        ParallelText(source=files["source"])
    with pytest.raises(ValueError, match="not both"):
        ParallelText(**files, catalogs=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"data\.package=no-such-package.*pip install"):
        ParallelText(package="no-such-package")
    with pytest.raises(FileNotFoundError, match=r"data\.package=torch.*'de'"):
        ParallelText(package="torch")
    for setting in files:
        Path(files[setting]).write_text("one\n")
    with pytest.raises(ValueError, match=r"1 pairs read none is left for .*give more text"):
        ParallelText(**files)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("tokenizer", "words"),
        ("batch_size", 0),
        ("source_length", 1),
        ("target_length", 1),
        ("held_out_fraction", 0.5),
    ],
)
def test_bad_settings_are_named(setting: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"data\.{setting}="):
        ParallelText(**{setting: value})


def test_one_source_lies_in_one_part() -> None:
    pairs = [Pair(f"Word {n}{end}", f"{n} {end}") for n in range(1000) for end in ("", ":", "…")]
    parts = split_pairs(pairs, 0.1)
    assert sum(map(len, parts.values())) == len(pairs)
    sources = [{pair.source.rstrip(":…") for pair in part} for part in parts.values()]
    assert sum(map(len, sources)) == 1000
    assert len(parts["train"]) / len(pairs) == pytest.approx(0.8, abs=0.04)
    # Neither the order of the files nor further text moves a pair.
    again = split_pairs([*reversed(pairs), Pair("more", "mehr")], 0.1)
    assert set(parts["test"]) <= set(again["test"])


def test_rows_are_the_sentences(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    data.prepare_data()
    data.setup()
    batch = data.training_rows(np.arange(50))
    source = batch["source"]
    target_in = batch["target_in"]
    targets = batch["targets"]
    assert {values.dtype for values in batch.values()} == {torch.int64}
    assert source.shape == (50, 8)
    assert target_in.shape == targets.shape == (50, 24)
    assert set(zip(data.decode(source), data.decode(targets), strict=True)) <= set(
        data.texts["train"]
    )
    assert (target_in[:, 0] == BOS).all()
    inner = target_in[:, 1:] != PAD
    assert torch.equal(target_in[:, 1:][inner], targets[:, :-1][inner])
    assert ((source == EOS).sum(1) == 1).all()
    assert ((targets == EOS).sum(1) == 1).all()
    # After the end there is nothing but filling.
    ended = (targets == EOS).cumsum(1) - (targets == EOS).int() > 0
    assert torch.equal(ended, targets == IGNORED)
    assert max(source.max(), target_in.max()) < data.vocabulary_size


def test_a_training_row_is_a_function_of_the_seed_and_its_number(tmp_path: Path) -> None:
    data = make_data(tmp_path, tokenizer="byte")
    other = make_data(tmp_path, tokenizer="byte", seed=1)
    data.setup()
    other.setup()
    together, apart = (
        data.training_rows(numbers) for numbers in (np.arange(8), np.arange(7, -1, -1))
    )
    assert all(torch.equal(values, apart[name].flip(0)) for name, values in together.items())
    assert not torch.equal(other.training_rows(np.arange(8))["source"], together["source"])


def test_evaluation_reads_every_pair_once_in_batches_of_one_shape(tmp_path: Path) -> None:
    data = make_data(tmp_path, eval_batch_size=7)
    data.setup()
    batches = list(data.val_dataloader())
    assert {batch["source"].shape for batch in batches} == {(7, 8)}
    assert {batch["targets"].shape for batch in batches} == {(7, 24)}
    real = [(batch["targets"] != IGNORED).any(1) for batch in batches]
    sources = [
        text
        for batch, rows in zip(batches, real, strict=True)
        for text in data.decode(batch["source"][rows])
    ]
    assert sources == [pair.source for pair in data.texts["val"]]
    assert not real[-1].all()
    # A row that fills up has a source to attend to all the same.
    assert (batches[-1]["source"] != PAD).any(1).all()


def test_what_is_left_out_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_catalog(tmp_path / "de" / "x.mo", {f"Message {n}": f"Nachricht {n}" for n in range(300)})
    write_catalog(
        tmp_path / "de" / "y.mo", {"Message 1": "Nachricht 1", "Empty": "", "Long" * 20: "Lang"}
    )
    data = ParallelText(catalogs=str(tmp_path), tokenizer="byte")
    with caplog.at_level("INFO"):
        data.setup()
    assert (
        "kept 300 of 303 pairs (left out: 1 empty, 1 repeated, 1 too long for data.source_length=32"
        in caplog.text
    )
    sizes = [len(part["source"]) for part in data.parts.values()]
    assert sum(sizes) == 300
    # Only asked for once they are tokens: too short a length leaves nothing.
    with pytest.raises(
        ValueError, match=r"none is left for train and val and test.*data\.source_length=8"
    ):
        ParallelText(catalogs=str(tmp_path), tokenizer="byte", source_length=8).setup()


def test_one_tokenizer_learns_from_both_languages_of_the_training_part(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    data.texts["val"] += [Pair("quokka " * 9, "zygomorph " * 9)]
    data.setup()
    vocabulary = data.tokenizer._tokenizer.get_vocab()
    assert {"Ġdrei", "Ġsieben", "10"} <= set(vocabulary)
    assert not any("kk" in token or "mor" in token for token in vocabulary)
    assert data.vocabulary_size == len(vocabulary) + FIRST_TOKEN
