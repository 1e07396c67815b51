"""Criteo's Kaggle clicks: ``data=criteo data.path=train.txt``, prepared once and then read from memory-mapped files.

The file holds 7 days in the order of time without marks between them, so days are equal parts of it. All but the last
are trained on and give the vocabularies; the last is half for validation and half for test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn

from dlrm.criteo_folder import ROW, Folder, Manifest, PrepareSettings, folder_of
from dlrm.criteo_input import check_input
from dlrm.criteo_lines import NUM_INTEGERS
from dlrm.criteo_prepare import prepare, summary
from dlrm.criteo_shuffle import shuffled
from dlrm.criteo_stages import ON_ERROR, rows_name
from dlrm.criteo_vocabulary import NUM_RESERVED
from streams import Batch, EvaluationRange, TrainingStream, batches_to_cover, rank_and_world_size, rank_rows


class PreparedRows:
    """Random access to the rows of a prepared folder.

    Args:
        folder: The folder.
        manifest: What is in it.

    Raises:
        ValueError: If a shard is missing or has not the size it should have.
    """

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self._shards: list[npt.NDArray] = []
        for index, shard in enumerate(manifest.shards):
            if not shard.rows:
                continue
            rows = folder.read_array(rows_name(index))
            if rows.shape != (shard.rows,) or rows.dtype != ROW:
                raise folder.damaged(rows_name(index), f"{rows.shape} of {rows.dtype}")
            self._shards.append(rows)
        self._ends = np.cumsum([len(rows) for rows in self._shards])

    def __getitem__(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray:
        """Read rows ``[n]`` of dtype ``ROW``."""
        rows = np.empty(len(numbers), dtype=ROW)
        shards = np.searchsorted(self._ends, numbers, side="right")
        for shard in np.unique(shards).tolist():
            chosen = np.flatnonzero(shards == shard)
            start = self._ends[shard] - len(self._shards[shard])
            rows[chosen] = self._shards[shard][numbers[chosen] - start]
        return rows


class Criteo(LightningDataModule):
    """Criteo's Kaggle Display Advertising Challenge.

    Batches are ``{"dense": float32 [n, 13], "categorical": int64 [n, 26], "label": float32 [n]}``. Dense features are
    ``log(1 + x)``, missing and negative ones 0. In every table, id 0 is a missing value, id 1 a value that is rare or
    was never seen in training, and the others follow from the most frequent in training to the least.

    An epoch is one seeded shuffle after the other without a seam, computed place by place. Preparing happens once, on
    one process a node while the others wait (Lightning waits without a time limit); for the whole file that takes
    minutes, and ``python experiments/dlrm/criteo_prepare.py PATH`` does it beforehand.

    Args:
        path: The training file, plain or gzip.
        days: Equal days that the file is cut into by position.
        min_count: Values that come less often in training share id 1; 1 keeps every value, as the reference does.
        max_rows_per_table: The most rows of a table, the 2 reserved ones included; the least frequent values go to
            id 1. None for no bound.
        on_error: ``raise`` stops at a line that is no row; ``quarantine`` copies it to ``quarantine.tsv`` in the
            folder of prepared rows and goes on.
        batch_size: Training rows a rank.
        eval_batch_size: Validation rows a rank; fewer where there are not as many.
        seed: Chooses the order of training.
        cache_dir: Where folders of prepared rows lie, ``criteo-*``, one an input and its settings; they may be deleted.
        shard_bytes: Bytes of text that are prepared at a time; takes about 5 times that in memory.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a setting is out of range, or the file is empty or an archive.
    """

    num_dense = NUM_INTEGERS

    def __init__(
        self,
        path: str | None,
        days: int = 7,
        min_count: int = 10,
        max_rows_per_table: int | None = None,
        on_error: str = "raise",
        batch_size: int = 128,
        eval_batch_size: int = 1024,
        seed: int = 0,
        cache_dir: str = "outputs/cache",
        shard_bytes: int = 2**26,
    ) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("eval_batch_size", eval_batch_size)):
            if value < 1:
                raise ValueError(f"data.{name}={value}: must be at least 1")
        if on_error not in ON_ERROR:
            raise ValueError(f"data.on_error={on_error!r}: choose one of {', '.join(ON_ERROR)}")
        if path is None:
            raise ValueError("data.path=null: give train.txt of Criteo's Kaggle challenge, data.path=train.txt")
        self.path = Path(path)
        check_input(self.path)
        self.settings = PrepareSettings(days, min_count, max_rows_per_table, shard_bytes)
        self.on_error = on_error
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.seed = seed
        self.cache_dir = Path(cache_dir)
        self.manifest: Manifest | None = None
        self._rows: PreparedRows | None = None

    @property
    def table_rows(self) -> list[int]:
        """Rows of each embedding table; known after ``setup``."""
        return [table.values + NUM_RESERVED for table in self._get_manifest().tables]

    @property
    def parts(self) -> dict[str, range]:
        """Row numbers of ``train``, ``val`` and ``test``; known after ``setup``."""
        return self._get_manifest().parts

    def _get_manifest(self) -> Manifest:
        if self.manifest is None:
            raise RuntimeError("the rows are known after Criteo.setup()")
        return self.manifest

    def prepare_data(self) -> None:
        """Prepare the rows if they are not: one process a node does, the others wait."""
        show_progress = self.trainer is None or self.trainer.is_global_zero
        prepare(self.path, self.cache_dir, self.settings, self.on_error, show_progress)

    def setup(self, stage: str | None = None) -> None:
        """Open the prepared rows."""
        if self.manifest is not None:
            return
        folder = Folder(folder_of(self.path, self.cache_dir, self.settings))
        manifest = folder.read_manifest()
        if manifest is None or manifest.stage != "done":
            raise RuntimeError(f"the rows in {folder.root} are not prepared; call Criteo.prepare_data() first")
        if manifest.quarantined or manifest.damage:
            rank_zero_warn(f"{summary(manifest)}; see {folder.root}")
        self._rows = PreparedRows(folder, manifest)
        self.manifest = manifest

    def rows(self, numbers: npt.NDArray[np.int64]) -> Batch:
        """Give the rows with these numbers, counted from the start of the file, as a batch."""
        self._get_manifest()
        rows = self._rows[numbers]
        return {
            "dense": torch.from_numpy(np.ascontiguousarray(rows["dense"])),
            "categorical": torch.from_numpy(rows["categorical"].astype(np.int64)),
            "label": torch.from_numpy(np.ascontiguousarray(rows["label"])),
        }

    def train_dataloader(self) -> TrainingStream:
        rank, world_size = rank_and_world_size(self.trainer)
        size = len(self.parts["train"])

        def make_batch(batch: int) -> Batch:
            places = rank_rows(batch, batch_size=self.batch_size, rank=rank, world_size=world_size)
            return self.rows(shuffled(places, size, self.seed))

        return TrainingStream(make_batch, -(-size // (self.batch_size * world_size)))

    def _evaluation(self, part: str) -> EvaluationRange:
        rank, world_size = rank_and_world_size(self.trainer)
        numbers = self.parts[part]
        # A sample of the file may have fewer rows than a batch on every rank.
        batch_size = max(1, min(self.eval_batch_size, len(numbers) // world_size))
        split: dict[str, Any] = {"batch_size": batch_size, "world_size": world_size}

        def make_batch(batch: int) -> Batch:
            return self.rows(numbers.start + rank_rows(batch, rank=rank, total=len(numbers), **split))

        return EvaluationRange(make_batch, batches_to_cover(len(numbers), **split))

    def val_dataloader(self) -> EvaluationRange:
        return self._evaluation("val")

    def test_dataloader(self) -> EvaluationRange:
        return self._evaluation("test")
