import math
from pathlib import Path

import numpy as np
import pytest
import sympy
import torch

from nlp.data import IGNORED, TextData, documentation, sources, split_text
from nlp.model import TransformerLanguageModel
from nlp.tokenizer import BytePairTokenizer


def test_the_sources_are_one_text_for_all_of_ten_megabytes() -> None:
    """Oracle: the size by rule, and the file of SymPy 1.14 whose path's digest comes first."""
    text = sources()
    assert len(text) == 10_000_000
    assert text.startswith((Path(sympy.__file__).parent / "solvers" / "simplex.py").read_bytes())


def test_the_documentation_is_there_and_splits() -> None:
    text = documentation()
    assert len(text) > 300_000
    parts = split_text(text, 0.05)
    assert b"".join(parts.values()) == text
    assert len(parts["train"]) == pytest.approx(0.9 * len(text), abs=8)
    assert len(parts["val"]) == pytest.approx(0.05 * len(text), abs=8)


def test_a_split_does_not_cut_characters() -> None:
    for text in ("é" * 101, "日本語" * 40, "a😀" * 57):
        parts = split_text(text.encode(), 0.05)
        assert "".join(part.decode() for part in parts.values()) == text


def test_a_training_window_is_a_function_of_its_number(tmp_path: Path) -> None:
    data = TextData(context_length=16, cache_dir=str(tmp_path))
    data.setup()
    together, apart = (
        data.training_rows(numbers) for numbers in (np.arange(40, 48), np.arange(47, 39, -1))
    )
    assert torch.equal(together["inputs"], apart["inputs"].flip(0))
    assert torch.equal(together["inputs"][:, 1:], together["targets"][:, :-1])


def test_validation_reads_every_token_once() -> None:
    data = TextData(context_length=100, eval_batch_size=7)
    data.setup()
    targets = torch.cat([batch["targets"].flatten() for batch in data.val_dataloader()])
    np.testing.assert_array_equal(targets[targets != IGNORED].numpy(), data.tokens["val"][1:])


def test_any_file_can_be_read_as_bytes(tmp_path: Path) -> None:
    file = tmp_path / "bytes"
    file.write_bytes(bytes(range(256)) * 40)
    data = TextData(path=str(file), context_length=16)
    data.setup()
    assert data.vocabulary_size == 256
    assert data.bytes_per_token == {"train": 1.0, "val": 1.0, "test": 1.0}


def test_file_errors_name_the_setting(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data\.path=.*nothing"):
        TextData(path=str(tmp_path / "nothing"))
    empty = tmp_path / "empty"
    empty.write_text("")
    with pytest.raises(ValueError, match=r"data\.path=.*is empty"):
        TextData(path=str(empty))
    short = tmp_path / "short"
    short.write_text("too short " * 100)
    with pytest.raises(
        ValueError, match=r"too short, its val part has 50 tokens.*data\.context_length"
    ):
        TextData(path=str(short), context_length=128).setup()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("tokenizer", "words"),
        ("batch_size", 0),
        ("context_length", 0),
        ("held_out_fraction", 0.5),
        ("corpus", "prose"),
    ],
)
def test_bad_settings_are_named(setting: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"data\.{setting}="):
        TextData(**{setting: value})


def test_bpe_learns_from_the_training_part_only(tmp_path: Path) -> None:
    # The held-out end has its own words: had they been read, they would be tokens.
    file = tmp_path / "text"
    file.write_text("the cat sat on the mat. " * 2000 + "zygomorphic quokkas juxtapose. " * 170)
    data = TextData(
        path=str(file),
        tokenizer="bpe",
        vocabulary_size=300,
        context_length=16,
        cache_dir=str(tmp_path / "cache"),
    )
    data.prepare_data()
    data.setup()
    vocabulary = data.tokenizer._tokenizer.get_vocab()
    assert "Ġcat" in vocabulary
    assert not any("quok" in token for token in vocabulary)
    assert data.bytes_per_token["train"] > 2 * data.bytes_per_token["test"]
    parts = split_text(file.read_bytes(), 0.05)
    for name, part in parts.items():
        assert data.tokenizer.decode(data.tokens[name]) == part.decode()
    # Only the training part decides which cached file is used.
    files = list((tmp_path / "cache").iterdir())
    assert len(files) == 1
    changed = files[0].stat().st_mtime_ns
    file.write_text(file.read_text()[:-31] + "x" * 31)
    again = TextData(
        path=str(file),
        tokenizer="bpe",
        vocabulary_size=300,
        context_length=16,
        cache_dir=str(tmp_path / "cache"),
    )
    again.setup()
    assert [entry.stat().st_mtime_ns for entry in (tmp_path / "cache").iterdir()] == [changed]


def test_bpe_counts_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"plain words and a bad byte \xff in them. " * 100)
    data = TextData(
        path=str(file),
        tokenizer="bpe",
        vocabulary_size=280,
        context_length=8,
        cache_dir=str(tmp_path),
    )
    with pytest.warns(UserWarning, match="100 bytes are not UTF-8"):
        data.setup()


def test_bpe_needs_room_for_the_bytes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.vocabulary_size=100"):
        BytePairTokenizer.train_or_load(b"text", 100, tmp_path)


def test_the_model_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = TransformerLanguageModel(50, 12, num_layers=2, width=16, num_heads=2).eval()
    tokens = torch.randint(50, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 50
    before = model(tokens)
    after = model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])
    loss = torch.nn.functional.cross_entropy(before.flatten(0, 1), tokens.flatten())
    assert loss.item() == pytest.approx(math.log(50), rel=0.1)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match=r"model\.num_heads=3"):
        TransformerLanguageModel(50, 12, width=16, num_heads=3)
