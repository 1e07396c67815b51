import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st

from criteo_reference import make_lines, prepare_rows
from distributed.scripts import train_on_ranks
from dlrm.criteo import Criteo
from dlrm.criteo_folder import PrepareSettings
from dlrm.criteo_sample import write_sample
from dlrm.criteo_shuffle import shuffled
from dlrm.module import ClickModule
from streams import TrainingStream

ROOT = Path(__file__).parents[2]
LINES = make_lines(500)


class Ranks:
    """As much of a Trainer as a data module asks for."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.global_rank, self.world_size, self.is_global_zero = rank, world_size, False


def make_data(folder: Path, rank: int = 0, world_size: int = 1, **options: object) -> Criteo:
    path = folder / "train.txt"
    if not path.exists():
        path.write_bytes(b"\n".join(LINES))
    options = {"min_count": 3, "batch_size": 8, "eval_batch_size": 16, "shard_bytes": 20_000, **options}
    data = Criteo(str(path), cache_dir=str(folder / "cache"), **options)
    data.trainer = Ranks(rank, world_size)
    data.prepare_data()
    data.setup()
    return data


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 10))
def test_every_epoch_holds_every_row_once(size: int, seed: int, epoch: int) -> None:
    rows = shuffled(np.arange(epoch * size, (epoch + 1) * size), size, seed)
    np.testing.assert_array_equal(np.sort(rows), np.arange(size))
    part = shuffled(np.arange(epoch * size + size // 2, epoch * size + size // 2 + 3), size, seed)
    both = np.concatenate([rows, shuffled(np.arange((epoch + 1) * size, (epoch + 2) * size), size, seed)])
    np.testing.assert_array_equal(part, np.resize(both[size // 2 : size // 2 + 3], 3) if size > 2 else part)


def test_the_order_is_shuffled_well_and_differs_between_epochs_and_seeds() -> None:
    size = 100_000
    first = shuffled(np.arange(size), size, 0)
    for other in (np.arange(size), shuffled(np.arange(size, 2 * size), size, 0), shuffled(np.arange(size), size, 1)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.02
        assert (first == other).sum() < 10
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.02
    # Neighbours of the file spread over the epoch: a chi-squared test of where every hundredth stretch lands.
    counts = np.bincount(np.argsort(first)[:1000] // 1000, minlength=100)
    assert ((counts - 10) ** 2 / 10).sum() < 160


def test_rows_come_as_batches_of_the_plain_way(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    expected, table_rows = prepare_rows(LINES, min_count=3)
    assert data.table_rows == table_rows
    assert data.num_dense == 13
    numbers = np.random.default_rng(0).permutation(500)
    batch = data.rows(numbers)
    assert {name: (values.dtype, tuple(values.shape)) for name, values in batch.items()} == {
        "dense": (torch.float32, (500, 13)),
        "categorical": (torch.int64, (500, 26)),
        "label": (torch.float32, (500,)),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(batch[name].numpy(), values[numbers], rtol=1e-6)
    module = ClickModule(4, [8], [8], num_dense=data.num_dense, table_rows=data.table_rows)
    assert module(batch["dense"], batch["categorical"]).shape == (500,)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_step_trains_on_the_same_rows_for_any_number_of_ranks(world_size: int, tmp_path: Path) -> None:
    streams = [
        iter(make_data(tmp_path, rank, world_size, batch_size=32 // world_size).train_dataloader())
        for rank in range(world_size)
    ]
    expected = make_data(tmp_path, batch_size=32)
    training = len(expected.parts["train"])
    assert len(expected.train_dataloader()) == -(-training // 32)
    for step in range(3):
        parts = [next(stream) for stream in streams]
        rows = shuffled(np.arange(32 * step, 32 * step + 32), training, 0)
        assert rows.max() < training
        for name, values in expected.rows(rows).items():
            assert torch.equal(torch.cat([part[name] for part in parts]), values)


def test_training_continues_where_it_was(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    whole = [batch["categorical"] for _ in range(2) for batch in data.train_dataloader()]
    first: TrainingStream = data.train_dataloader()
    batches = iter(first)
    seen = [next(batches)["categorical"] for _ in range(5)]
    second = make_data(tmp_path).train_dataloader()
    second.load_state_dict(first.state_dict())
    seen += [batch["categorical"] for batch in second]
    assert all(torch.equal(a, b) for a, b in zip(seen, whole, strict=False))
    assert len(seen) == len(first)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("eval_batch_size", [5, 1024])
def test_the_last_day_is_read_once_in_equally_many_batches(
    world_size: int, eval_batch_size: int, tmp_path: Path
) -> None:
    for part in ("val", "test"):
        loaders, counts = [], set()
        for rank in range(world_size):
            data = make_data(tmp_path, rank, world_size, eval_batch_size=eval_batch_size)
            loader = getattr(data, f"{part}_dataloader")()
            loaders.append(list(loader))
            counts.add(len(loader))
        assert len(counts) == 1
        assert all(len(batches[0]["label"]) for batches in loaders)
        rows = torch.cat([batch["dense"] for batches in zip(*loaders, strict=True) for batch in batches])
        assert torch.equal(rows, data.rows(np.array(data.parts[part]))["dense"])


@pytest.mark.parametrize(
    ("setting", "value"),
    [("days", 1), ("min_count", 0), ("max_rows_per_table", 2), ("on_error", "ignore"), ("batch_size", 0),
     ("eval_batch_size", 0), ("shard_bytes", 0), ("path", None), ("path", "nowhere/train.txt")],
)  # fmt: skip
def test_bad_settings_are_named_at_once(setting: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(LINES[0])
    with pytest.raises((ValueError, FileNotFoundError), match=rf"data\.{setting}="):
        Criteo(**{"path": str(path), setting: value})


def test_lines_that_were_set_aside_are_not_forgotten(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(b"\n".join([*LINES, b"bad"]))
    for _ in range(2):
        with pytest.warns(
            UserWarning, match=r"500 rows, .* 1 lines quarantined in quarantine\.tsv; see .*criteo-train"
        ):
            make_data(tmp_path, on_error="quarantine")


def test_rows_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    fresh = Criteo(str(data.path), cache_dir=str(tmp_path / "elsewhere"))
    with pytest.raises(RuntimeError, match=r"after Criteo\.setup"):
        _ = fresh.table_rows
    with pytest.raises(RuntimeError, match=r"prepare_data\(\) first"):
        fresh.setup()
    (shard,) = tmp_path.glob("cache/criteo-train-*/rows-00001.npy")
    shard.write_bytes(shard.read_bytes()[:500])
    data.manifest = None
    with pytest.raises(ValueError, match=r"rows-00001\.npy is damaged .*; delete .* to prepare the rows again"):
        data.setup()


def test_the_configuration_says_what_the_classes_say(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(LINES[0])
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("train", ["experiment=dlrm", "data=criteo", f"data.path={path}", f"paths.root_dir={tmp_path}"])
    data = instantiate(config.data)
    assert data.settings == PrepareSettings()
    assert data.cache_dir == tmp_path / "outputs" / "cache"
    defaults = Criteo(str(path))
    for name in ("settings", "on_error", "batch_size", "eval_batch_size", "seed"):
        assert getattr(data, name) == getattr(defaults, name)


def test_two_processes_train_on_made_up_lines(ranks: Any, tmp_path: Path) -> None:
    write_sample(tmp_path / "train.txt", 3000)
    overrides = ("experiment=dlrm", "data=criteo", "logger=none", "data.path=train.txt", "trainer.max_steps=4")
    printed = train_on_ranks(ranks, tmp_path, *overrides)
    (result,) = tmp_path.glob("outputs/*/*/result.json")
    figures = json.loads(result.read_text())
    assert (figures["steps"], figures["world_size"]) == (4, 2)
    assert 0 < figures["metrics"]["test/auc"] < 1
    assert printed.count("rows, ") == 1  # Rank 0 alone prepares, and says so.
