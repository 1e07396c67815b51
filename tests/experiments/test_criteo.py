"""Criteo's file as rows, against reading it line by line in plain Python."""

import gzip
import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from distributed.scripts import train_on_ranks
from dlrm import criteo
from dlrm.criteo import Criteo, Folder, parse
from dlrm.module import ClickModule
from streams import shuffled

ROOT = Path(__file__).parents[2]
REAL_SAMPLE = Path("/work/shared/data/criteo/kaggle_raw_999.tsv")


def make_lines(rows: int, seed: int = 0, values: int = 40) -> list[bytes]:
    """Lines with a skewed choice of ``values`` values a category, some of each missing, and
    negative integers.
    """
    random = np.random.default_rng(seed)
    lines = []
    for _ in range(rows):
        integers = [str(int(n)) if n > -3 else "" for n in random.geometric(0.05, 13) - 4]
        ids = (values * random.random(26) ** 3).astype(int)
        categories = [f"{i * 2654435761 % 2**32:08x}" if i else "" for i in ids]
        lines.append("\t".join([str(random.integers(2)), *integers, *categories]).encode())
    return lines


# Values that come in the last day only must not be known; and lines that have lost their empty last
# fields.
LINES = [
    line[:-2] if line.endswith(b"\t\t") else line
    for line in make_lines(600) + make_lines(100, 1, 80)
]
BAD = {
    3: b"",
    4: b"\0\xff",
    250: b"x\ty",
    699: LINES[0] + b"\t" * 4,
    700: LINES[1].replace(b"\t", b"\tz", 1),
}
"""Lines that are no rows, by their number once they are put in."""


def read_row(line: bytes) -> tuple[int, list[float], list[str]]:
    fields = line.decode().split("\t")
    fields += [""] * (40 - len(fields))
    return (
        int(fields[0]),
        [math.log1p(max(0, int(text or "0"))) for text in fields[1:14]],
        fields[14:],
    )


def prepared_by_loop(
    lines: list[bytes], min_count: int, max_rows: int | None
) -> tuple[dict[str, Any], list[int]]:
    rows = [read_row(line) for line in lines]
    training = rows[: len(rows) - len(rows) // 7]
    ids: list[dict[str, int]] = []
    for category in range(26):
        counts = Counter(row[2][category] for row in training)
        kept = sorted(
            (v for v in counts if v and counts[v] >= min_count), key=lambda v: (-counts[v], v)
        )
        ids.append(
            {
                "": 0,
                **{
                    value: 2 + place
                    for place, value in enumerate(kept[: max_rows and max_rows - 2])
                },
            }
        )
    batch = {
        "label": np.array([row[0] for row in rows], dtype=np.float32),
        "dense": np.array([row[1] for row in rows], dtype=np.float32),
        "categorical": np.array(
            [[ids[c].get(value, 1) for c, value in enumerate(row[2])] for row in rows]
        ),
    }
    return batch, [len(table) + 1 for table in ids]


def make_data(
    folder: Path, lines: list[bytes] = LINES, rank: int = 0, world_size: int = 1, **options: Any
) -> Criteo:
    path = folder / options.pop("name", "train.txt")
    if not path.exists():
        content = b"\n".join(lines)
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    options = {"min_count": 3, "batch_size": 8, "eval_batch_size": 16, **options}
    data = Criteo(str(path), cache_dir=str(folder / "cache"), **options)
    data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size)
    data.prepare_data()
    data.setup()
    return data


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo, "SHARD_BYTES", 30_000)


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
@pytest.mark.parametrize("max_rows", [None, 30])
def test_rows_and_tables_are_those_of_the_plain_way(
    name: str, max_rows: int | None, tmp_path: Path
) -> None:
    data = make_data(tmp_path, name=name, max_rows_per_table=max_rows)
    expected, table_rows = prepared_by_loop(LINES, 3, max_rows)
    assert data.table_rows == table_rows
    assert [len(part) for part in data.parts.values()] == [600, 50, 50]
    assert len(data.folder.notes["shards"]) > 3
    numbers = np.random.default_rng(0).permutation(700)
    batch = data.rows(numbers)
    for key, values in expected.items():
        np.testing.assert_allclose(batch[key].numpy(), values[numbers], rtol=1e-6)
    module = ClickModule(4, [8], [8], num_dense=data.num_dense, table_rows=data.table_rows)
    assert module(batch["dense"], batch["categorical"]).shape == (700,)


@pytest.mark.skipif(
    not REAL_SAMPLE.exists(), reason="a sample of the real file is not on this machine"
)
def test_the_real_file() -> None:
    """Of its 1,000 lines half have lost their empty last fields."""
    lines = REAL_SAMPLE.read_bytes().splitlines()
    columns, bad = parse(lines)
    assert not bad
    expected = [read_row(line) for line in lines]
    np.testing.assert_array_equal(columns[0].view(np.float32), [row[0] for row in expected])
    np.testing.assert_allclose(
        columns[1:14].view(np.float32).T, [row[1] for row in expected], rtol=1e-6
    )
    np.testing.assert_array_equal(
        columns[14:].T, [[int(text or "0", 16) for text in row[2]] for row in expected]
    )


def test_bad_lines_are_named_or_counted(tmp_path: Path) -> None:
    lines = list(LINES)
    for number, text in BAD.items():
        lines.insert(number - 1, text)
    with pytest.raises(
        ValueError, match=r"train\.txt, line 3: b'.*' is no row; data\.on_error=skip"
    ):
        make_data(tmp_path, lines)
    for _ in range(2):
        with pytest.warns(
            UserWarning, match=r"5 lines of the text are left out, the first is .*line 3"
        ):
            data = make_data(tmp_path, on_error="skip")
    clean = make_data(tmp_path, LINES, name="clean.txt")
    numbers = np.arange(700)
    assert torch.equal(data.rows(numbers)["categorical"], clean.rows(numbers)["categorical"])
    with pytest.raises(ValueError, match=r"line 1: b'1\\t.*' is no row"):
        make_data(tmp_path, [b"1\t5\t" + LINES[0]], name="no_row.txt")
    with pytest.raises(ValueError, match=r"13 rows are too few for data\.days=7"):
        make_data(tmp_path, LINES[:13], name="few.txt")


def test_a_truncated_gzip_file(tmp_path: Path) -> None:
    path = tmp_path / "train.txt.gz"
    content = gzip.compress(b"\n".join(LINES))
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="the gzip file is damaged"):
        make_data(tmp_path, name="train.txt.gz")


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_what_was_interrupted_goes_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before and after every file gets its name; what was written before is not written
    again.
    """
    (tmp_path / "whole").mkdir()
    expected = make_data(tmp_path / "whole", name=name)
    replace = criteo.os.replace
    stops = 0
    written: list[str] = []

    def stopping(source: Path, target: Path) -> None:
        nonlocal stops
        written.append(Path(target).name)
        if len(written) % 3 == 0:
            stops += 1
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(criteo.os, "replace", stopping)
    while True:
        try:
            data = make_data(tmp_path, name=name)
            break
        except KeyboardInterrupt:
            continue
    assert stops > 10
    numbers = np.arange(700)
    for key, values in expected.rows(numbers).items():
        assert torch.equal(data.rows(numbers)[key], values)
    assert max(Counter(file for file in written if file.startswith("read-")).values()) <= 2
    assert sorted(file.name for file in data.folder.root.iterdir()) == [
        "lock",
        "notes.json",
        "rows.npy",
    ]


def test_every_epoch_holds_every_row_once_in_another_order() -> None:
    first, second = (
        shuffled(np.arange(epoch * 1000, (epoch + 1) * 1000), 1000, seed=3) for epoch in (0, 1)
    )
    for rows in (first, second):
        np.testing.assert_array_equal(np.sort(rows), np.arange(1000))
    assert (first == second).sum() < 10
    np.testing.assert_array_equal(
        shuffled(np.arange(990, 1010), 1000, seed=3), [*first[-10:], *second[:10]]
    )


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_number_of_ranks_reads_the_same_rows(world_size: int, tmp_path: Path) -> None:
    made = [
        make_data(tmp_path, LINES, rank, world_size, batch_size=32 // world_size)
        for rank in range(world_size)
    ]
    streams = [iter(data.train_dataloader()) for data in made]
    alone = make_data(tmp_path, batch_size=32)
    assert len(alone.train_dataloader()) == -(-600 // 32)
    for step in range(3):
        parts = [next(stream) for stream in streams]
        rows = shuffled(np.arange(32 * step, 32 * step + 32), 600, 0)
        for key, values in alone.rows(rows).items():
            assert torch.equal(torch.cat([part[key] for part in parts]), values)
    for part in ("val", "test"):
        loaders = [list(getattr(data, f"{part}_dataloader")()) for data in made]
        rows = torch.cat(
            [batch["dense"] for batches in zip(*loaders, strict=True) for batch in batches]
        )
        assert torch.equal(rows, alone.rows(np.array(alone.parts[part]))["dense"])


@pytest.mark.parametrize(
    ("setting", "value"),
    [("days", 1), ("min_count", 0), ("max_rows_per_table", 2), ("on_error", "ignore"), ("batch_size", 0),
     ("eval_batch_size", 0), ("path", None), ("path", "nowhere/train.txt")],
)  # fmt: skip
def test_bad_settings_are_named_at_once(setting: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(LINES[0])
    with pytest.raises((ValueError, FileNotFoundError), match=rf"data\.{setting}="):
        Criteo(**{"path": str(path), setting: value})


def test_another_file_or_other_settings_have_another_folder(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(LINES[0])
    folders = {Criteo(str(path), min_count=count).folder.root for count in (3, 3, 4)}
    path.write_bytes(LINES[1] + LINES[2])
    folders.add(Criteo(str(path), min_count=3).folder.root)
    assert len(folders) == 3
    with pytest.raises(RuntimeError, match=r"prepare_data\(\) first"):
        Criteo(str(path)).setup()
    assert Folder(tmp_path, path, {"days": 7}).notes == {"shards": [], "bad": ""}


@pytest.mark.slow
def test_two_processes_train_as_configured(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(b"\n".join(make_lines(3000)))
    overrides = (
        "experiment=dlrm",
        "data=criteo",
        "logger=none",
        "data.path=train.txt",
        "trainer.max_steps=4",
    )
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose(
            "train",
            [*overrides[:2], f"data.path={tmp_path}/train.txt", f"paths.root_dir={tmp_path}"],
        )
    configured = instantiate(config.data)
    default = Criteo(f"{tmp_path}/train.txt")
    for name in ("batch_size", "eval_batch_size", "seed"):
        assert getattr(configured, name) == getattr(default, name)
    assert configured.folder.settings == default.folder.settings
    train_on_ranks(ranks, tmp_path, *overrides)
    (result,) = tmp_path.glob("outputs/*/*/result.json")
    figures = json.loads(result.read_text())
    assert (figures["steps"], figures["world_size"]) == (4, 2)
    assert 0 < figures["metrics"]["test/auc"] < 1
