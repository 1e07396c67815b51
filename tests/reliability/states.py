"""Checkpoint files of every kind, harmed as bytes and in what they say.

Bytes: what is read is an error that names the file, or the very state that was saved. Contents
(valid files and manifests that say something else): an error, or a state that the objects it is for
take over and are sound with, and files within the checkpoint's folder. Files of other ranks, saves
or steps: an error that names the file.
"""

import copy
import math
import os
import pickle
import random
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor

from differences import assert_same
from lightning_dct import CheckpointError
from lightning_dct.checkpoint.format import (
    identity,
    make_manifest,
    read_checked,
    rows_path,
    state_folder,
    state_path,
)
from lightning_dct.checkpoint.reading import agreed_manifests, merge_states
from lightning_dct.compress.bucket_plan import OwnedPiece
from lightning_dct.compress.error_feedback import ErrorFeedback
from lightning_dct.embedding.owners import place_tables
from lightning_dct.embedding.sharded import ShardedEmbeddingBags
from lightning_dct.embedding.store import RowStore
from lightning_dct.embedding.store_state import check_memory
from lightning_dct.embedding.table_files import INDEX, load_rows, save_rows
from reliability.mutations import mutate

TABLES = (50, 7)
DIM = 4
SIZES = {"a.weight": 120, "b.bias": 9}
MANIFEST = make_manifest(world_size=4, synchronisations=12, save="5f0c93ab", stages=2)
PIECES = {"a.weight[0:60]": OwnedPiece("a.weight[0:60]", "a.weight", 0, 60, 0)}


class Case(NamedTuple):
    """One mutation to try: what is harmed, what reads it, and what an error must say and be."""

    subject: str
    decode: Callable[[], None]
    says: str
    error: type[ValueError] = CheckpointError


class Foreign:
    """A class that no checkpoint has; unpickling it calls a function."""

    called = False

    def __reduce__(self) -> Any:
        return _call, ()


def _call() -> None:
    Foreign.called = True


class CheckpointCases:
    """Makes mutations of the files of one checkpoint."""

    def __init__(self, seed: int, folder: Path) -> None:
        torch.manual_seed(seed)
        self._folder = folder
        self._state = example_state()
        self._file = folder / "a.pt"
        torch.save(self._state, self._file)
        self._data = self._file.read_bytes()
        self._tables = ShardedEmbeddingBags(TABLES, DIM)
        self._tables.materialize()
        self._rows = self._tables.weight.detach().clone()
        self._rows_folder = folder / "rows"
        save_rows(str(self._rows_folder), {"tables": self._tables}, [])
        self._row_files = {path: path.read_bytes() for path in sorted(self._rows_folder.iterdir())}
        self._others = [self._data, *self._row_files.values(), pickle.dumps(self._state)]

    def next(self, chance: random.Random, number: int) -> Case:
        """The next one; they take turns."""
        kinds = (
            *(self._harmed_state, self._other_contents, self._harmed_rows, self._foreign_class),
            *(self._another_file, self._other_note),
        )
        return kinds[number % len(kinds)](chance)

    def _harmed_state(self, chance: random.Random) -> Case:
        self._file.write_bytes(mutate(chance, self._data, self._others))

        def decode() -> None:
            assert_same(read_checked(TorchCheckpointIO(), str(self._file), {}), self._state)

        return Case("states, bytes", decode, str(self._file))

    def _other_contents(self, chance: random.Random) -> Case:
        state = copy.deepcopy(self._state)
        for _ in range(chance.randint(1, 2)):
            change_something(chance, state)
        torch.save(state, self._file)

        def decode() -> None:
            take_over(read_checked(TorchCheckpointIO(), str(self._file), {}))

        # A whole state of another model is no damaged one.
        return Case("states, contents", decode, "", ValueError)

    def _another_file(self, chance: random.Random) -> Case:
        """A whole file of the same shape that was written for somebody else."""
        whose = identity(MANIFEST, 1)
        state = {**self._state}
        field = chance.choice(sorted(whose))
        other = {
            **whose,
            field: "00000000" if field == "save" else whose[field] + chance.choice((-1, 1)),
        }
        state["synchronisations"] = other.pop("synchronisations")
        torch.save({**state, "identity": other} if chance.random() < 0.9 else state, self._file)

        def decode() -> None:
            read_checked(TorchCheckpointIO(), str(self._file), whose)
            raise AssertionError("it was read")

        return Case("files of others", decode, str(self._file))

    def _other_note(self, chance: random.Random) -> Case:
        manifest = {**MANIFEST}
        for _ in range(chance.randint(1, 2)):
            change_something(chance, manifest)

        def decode() -> None:
            (agreed,) = agreed_manifests([manifest], "a.ckpt")
            for path in (state_path("a.ckpt", agreed, 0), rows_path("a.ckpt", agreed)):
                assert os.path.dirname(path) == state_folder("a.ckpt")
            assert agreed["world_size"] // agreed.get("stages", 1) >= 1

        return Case("notes, contents", decode, "a.ckpt")

    def _harmed_rows(self, chance: random.Random) -> Case:
        for path, data in self._row_files.items():
            path.write_bytes(data)
        path = chance.choice(list(self._row_files))
        path.write_bytes(mutate(chance, self._row_files[path], self._others))

        def decode() -> None:
            with torch.no_grad():
                self._tables.weight.fill_(7.0)
            load_rows(str(self._rows_folder), {"tables": self._tables})
            assert torch.equal(self._tables.weight, self._rows)

        return Case("rows, bytes", decode, str(self._rows_folder))

    def _foreign_class(self, chance: random.Random) -> Case:
        """A pickle that calls a function when it is read without care."""
        state = copy.deepcopy(self._state)
        state[chance.choice(list(state))] = Foreign()
        in_rows = chance.random() < 0.5
        if in_rows:
            for path, data in self._row_files.items():
                path.write_bytes(data)
            index = pickle.dumps(state)
            (self._rows_folder / INDEX).write_bytes(b"%08x\n" % zlib.crc32(index) + index)
        else:
            torch.save(state, self._file)

        def decode() -> None:
            try:
                if in_rows:
                    load_rows(str(self._rows_folder), {"tables": self._tables})
                else:
                    read_checked(TorchCheckpointIO(), str(self._file), {})
                raise AssertionError("it was read")
            finally:
                assert not Foreign.called

        return Case("foreign classes", decode, str(self._rows_folder if in_rows else self._file))


def example_state() -> dict[str, Any]:
    """A rank's state as the strategy saves it, with sharded tables and a split point."""
    wanted = np.array([0, 3, 20], dtype=np.int64)
    placement = place_tables(TABLES, 2)
    held = _remembered(placement.owned_rows[1], True)
    mirror = _remembered(placement.owned_rows[0], False)
    for rows in (held, mirror):
        for places in (wanted, wanted[:2]):
            rows.admit({1: places})
            rows.learn()
    tables = {
        "placement": asdict(placement),
        "held": held.state_dict(),
        "mirrors": mirror.state_dict(),
        "collected": [(torch.tensor([2, 5]), torch.randn(2, DIM))],
    }
    counted = {"steps": 12, "bytes_sent": 4000, "seconds": 0.5}
    return {
        "synchronisations": 12,
        "steps_since_refresh": 2,
        "thresholds": {"values": {"a.weight": 0.5}, "targets": {"a.weight": 12}},
        "residuals": {name: torch.randn(size) for name, size in SIZES.items()},
        "owned": {"a.weight": {0: torch.randn(60)}},
        "traffic": counted,
        "split_traffic": counted,
        "modules": {"tables": tables},
        "accumulated": {"a.weight": torch.tensor([math.nan])},
        "weights": {"a.weight": torch.full((3, 2), math.nan), "b.bias": torch.tensor([1j])},
        "optimizers": [
            {
                "state": {0: {"mean": torch.tensor([math.nan])}},
                "param_groups": [{"betas": (0.9, 0.99)}],
            }
        ],
        "exchange_clocks": {"a.weight": 4},
        "in_flight": {"a.weight": torch.ones(6)},
    }


def take_over(state: dict[str, Any]) -> None:
    """What strategies do with a state that has been read, and whether what comes of it is sound."""
    merged = merge_states([state])
    for own_or_mean in (merge_states([state, state]), merged):
        feedback = ErrorFeedback(PIECES, adapt_threshold=True, undoable=False)
        feedback.load_state_dict(own_or_mean, SIZES)
        for name, residual in feedback.residuals.state_dict().items():
            assert residual.numel() == SIZES.get(name, residual.numel())
            assert residual.isfinite().all()
        assert all(
            0 < threshold < math.inf for threshold in feedback.thresholds.by_label().values()
        )
    assert 0 <= merged["synchronisations"] < 10**12
    for tables in (states[0] for states in merged["modules"].values()):
        check_memory(tables, TABLES, DIM)
        placement = place_tables(TABLES, 2)
        for part, universe in (
            ("held", placement.owned_rows[1]),
            ("mirrors", placement.owned_rows[0]),
        ):
            if tables[part]["codes"].keys() != {1}:
                continue  # it is of other ranks, and refused as such
            rows = _remembered(universe, part == "held")
            rows.load_state_dict(tables[part])
            # It goes on to work: rows are found, made room for, and read.
            slots, _ = rows.admit({1: np.array([1, 3, 8], dtype=np.int64)})
            assert rows.copies[slots[1]].shape == (3, DIM)
            assert rows.residual.isfinite().all()
            assert np.isfinite(rows.thresholds).all()
            assert rows.cache.row_at[slots[1]].tolist() == [1, 3, 8]


def change_something(chance: random.Random, state: Any) -> None:
    """Go down into nested containers at random and remove, rename, exchange or resize what is found
    there.
    """
    while True:
        keys = list(state) if isinstance(state, dict) else list(range(len(state)))
        if not keys:
            return
        key = chance.choice(keys)
        value = state[key]
        if isinstance(value, (dict, list)) and len(value) and chance.random() < 0.8:
            state = value
            continue
        _change(chance, state, key, value)
        return


def _change(chance: random.Random, state: Any, key: Any, value: Any) -> None:
    ways = ["replace", "remove"]
    if isinstance(state, dict):
        ways.append("rename")
    if isinstance(value, Tensor):
        ways += ["resize", "retype", "numbers", "numbers"]
    way = chance.choice(ways)
    if way == "remove":
        del state[key]
    elif way == "rename":
        state[chance.choice(("another", 7, -1, ""))] = state.pop(key)
    elif way == "replace":
        state[key] = chance.choice(
            (
                None,
                -1,
                1 << 62,
                10**30,
                1e30,
                math.nan,
                "text",
                "../x",
                0.5,
                [],
                {},
                torch.zeros(3),
                torch.zeros(0, 2),
            )
        )
    elif way == "resize":
        state[key] = (
            torch.cat([value, value[:1]]) if value.ndim and chance.random() < 0.5 else value[:-1]
        )
    elif way == "retype":
        state[key] = value.to(
            chance.choice((torch.int32, torch.float16, torch.bool, torch.complex64))
        )
    else:
        odd = (math.nan, math.inf) if value.is_floating_point() else ()
        state[key] = torch.full_like(value, chance.choice((-1, 0, 1, 10_000, *odd)))


def _remembered(universe: int, with_residual: bool) -> RowStore:
    empty = torch.empty(0, DIM)
    return RowStore(
        5,
        {1: universe},
        2,
        len(TABLES),
        lambda _, places: torch.zeros(len(places), DIM),
        empty,
        with_residual,
    )
