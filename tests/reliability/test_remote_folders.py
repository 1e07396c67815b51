"""Checkpoints on file systems that only fsspec knows: what belongs to them lies there too, and
comes back.
"""

import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem

from distributed.harness import RankFailure
from distributed.training import assert_weights_equal
from embedding.hybrid import files_in, together, train

EXCHANGE: dict[str, Any] = {"density": 0.2}
SETTINGS: dict[str, Any] = {"optimizer": "row-wise adagrad", "strategy": {"density": 0.5}}


class Elsewhere(DirFileSystem):
    """A store that several processes see, as object stores are: ``elsewhere://path`` is a file of
    this machine.
    """

    protocol = "elsewhere"

    def __init__(self, **options: Any) -> None:
        super().__init__("/", fs=fsspec.filesystem("file"), **options)


def train_there(address: str, number: int, resumed: bool) -> Any:
    """Train and save, or resume from what was saved and train on; this rank's weights and what lies
    in the store.
    """
    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    place = {"ckpt_path": address, "max_epochs": 2} if resumed else {"save_to": address}
    weights = train(number, EXCHANGE, **SETTINGS, **place)
    files, path = fsspec.url_to_fs(os.path.dirname(address))
    return (
        weights,
        sorted(os.path.basename(name) for name in files.find(path)),
        os.path.exists(address.split("/")[0]),
    )


def save_and_resume(ranks: Any, world_size: int, address: str) -> tuple[list[Any], list[str]]:
    saved = ranks(world_size).run(train_there, address, 4, False)
    resumed = ranks(world_size).run(train_there, address, 4, True)
    # A folder named after the protocol, in the working directory.
    assert not any(local for *_, local in (*saved, *resumed))
    return [weights for weights, *_ in resumed], saved[0][1]


@pytest.mark.parametrize(
    ("world_size", "address"), [(1, "memory://{}/a.ckpt"), (2, "elsewhere://{}/a.ckpt")]
)
def test_tables_are_saved_and_resumed(
    ranks: Any, tmp_path: Path, world_size: int, address: str
) -> None:
    """Oracle: the same run saved on a disk, weights, rows and what the optimizer keeps for them."""
    (tmp_path / "disk").mkdir()
    expected, on_disk = save_and_resume(ranks, world_size, str(tmp_path / "disk" / "a.ckpt"))
    (tmp_path / "store").mkdir()
    resumed, in_store = save_and_resume(
        ranks, world_size, address.format(str(tmp_path / "store").lstrip("/"))
    )
    assert_weights_equal(together(resumed), together(expected))
    for names in (on_disk, in_store):
        assert [name for name in names if not name.endswith(".pt")] == [
            "a.ckpt",
            "index",
            *(f"rank-{rank}.rows" for rank in range(world_size)),
        ]
    if world_size > 1:
        assert len(files_in(str(tmp_path / "store"))) == len(in_store) == world_size * 2 + 2


def test_rows_of_another_save_are_refused(ranks: Any, tmp_path: Path) -> None:
    """Oracle: whole rows of the same tables, under the name of others."""
    for name in ("a", "b"):
        ranks(2).run(train_there, str(tmp_path / f"{name}.ckpt"), 4, False)
    (rows,), (others,) = (list(tmp_path.glob(f"{name}.ckpt.dct/*-rows")) for name in ("a", "b"))
    rows.rename(tmp_path / "aside")
    others.rename(rows)
    with pytest.raises(
        RankFailure, match=rf"{str(rows)!r} is damaged or does not fit \(.*{others.name}"
    ):
        ranks(2).run(train_there, str(tmp_path / "a.ckpt"), 4, True)
