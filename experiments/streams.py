"""The rows of each rank: global batch ``j`` is the same set of rows for any number of ranks.

With ``b`` rows a rank and ``W`` ranks, rank ``r`` takes rows ``[(j * W + r) * b, (j * W + r + 1) *
b)`` of a global order. As long as ``b * W`` stays the same, so do the rows of every optimizer step,
and runs with 1, 2 or 4 processes can be compared. The loaders here are plain iterables: Lightning
wraps no sampler around them.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from lightning.pytorch import LightningDataModule

Batch = dict[str, Any]
Rows = npt.NDArray[np.int64]


def rank_rows(
    batch: int, *, batch_size: int, rank: int, world_size: int, total: int | None = None
) -> Rows:
    """The rows that one rank reads in one global batch, int64.

    A bounded order ends after ``total`` rows: the ranks share what is left for its last batch.
    """
    start = batch * world_size * batch_size
    rows = world_size * batch_size
    if total is not None:
        rows = min(rows, max(total - start, 0))
    first, last = (start + number * rows // world_size for number in (rank, rank + 1))
    return np.arange(first, last, dtype=np.int64)


def batches_to_cover(total: int, *, batch_size: int, world_size: int) -> int:
    """Count the global batches that cover ``total`` rows: the same on every rank.

    Raises:
        ValueError: Some rank would read no row, which leaves metrics that gather rows without any.
    """
    if total < world_size:
        raise ValueError(
            f"{total} rows of evaluation data leave some of {world_size} ranks without any: give"
            " more."
        )
    return -(-total // (batch_size * world_size))


def rank_and_world_size(trainer: Any) -> tuple[int, int]:
    """Read from a Trainer which share of the data this rank reads, and of how many; ``(0, 1)``
    where there is none.

    The ranks of a pipeline all read the same share.
    """
    if trainer is None:
        return 0, 1
    # Strategies of a single process have none.
    share = getattr(trainer, "distributed_sampler_kwargs", None)
    return (
        (trainer.global_rank, trainer.world_size)
        if share is None
        else (share["rank"], share["num_replicas"])
    )


def shuffled(places: Rows, size: int, seed: int) -> Rows:
    """The rows at some places of an endless order, in which each ``size`` places in a row hold
    every row once.
    """
    epochs, within = np.divmod(places, size)
    rows = np.empty_like(places)
    for epoch in np.unique(epochs).tolist():
        rows[epochs == epoch] = _order(size, seed, epoch)[within[epochs == epoch]]
    return rows


@lru_cache(maxsize=2)
def _order(size: int, seed: int, epoch: int) -> npt.NDArray[np.uint32]:
    return np.random.default_rng((seed, epoch)).permutation(np.arange(size, dtype=np.uint32))


class TrainingStream:
    """An endless sequence of batches, cut into epochs, that continues where a checkpoint left it.

    ``make_batch`` builds this rank's part of global batch ``j``, as a pure function of ``j``.
    Lightning sees an end after each ``batches_per_epoch``; the next epoch continues the sequence.
    """

    def __init__(self, make_batch: Callable[[int], Batch], batches_per_epoch: int) -> None:
        if batches_per_epoch < 1:
            raise ValueError(f"an epoch needs at least one batch, got {batches_per_epoch}")
        self._make_batch = make_batch
        self._batches_per_epoch = batches_per_epoch
        self._position = 0

    def __len__(self) -> int:
        return self._batches_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        stop = (self._position // self._batches_per_epoch + 1) * self._batches_per_epoch
        while self._position < stop:
            batch = self._make_batch(self._position)
            # Before the yield: a checkpoint written while this batch is in use must continue after
            # it.
            self._position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"]


class EvaluationRange:
    """A fixed number of global batches, the same on every pass; ``make_batch`` as in
    :class:`TrainingStream`.
    """

    def __init__(self, make_batch: Callable[[int], Batch], num_batches: int) -> None:
        self._make_batch = make_batch
        self._num_batches = num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        return (self._make_batch(batch) for batch in range(self._num_batches))


def check_at_least(least: int, **settings: int) -> None:
    """Refuse settings below ``least``, with a ValueError that names the first of them."""
    for name, value in settings.items():
        if value < least:
            raise ValueError(f"data.{name}={value}: must be at least {least}")


class RowData(LightningDataModule):
    """Numbered rows to train on and to score. Subclasses define the rows; here ranks get theirs.

    Args:
        batch_size: Training rows a rank.
        eval_batch_size: Validation rows a rank.
    """

    def __init__(self, batch_size: int, eval_batch_size: int) -> None:
        super().__init__()
        check_at_least(1, batch_size=batch_size, eval_batch_size=eval_batch_size)
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size

    def num_rows(self, part: str) -> int:
        """Rows of a part: ``"train"``, ``"val"`` or ``"test"``; known after ``setup``."""
        raise NotImplementedError

    def training_rows(self, rows: Rows) -> Batch:
        """The training rows with these global numbers, which grow without end."""
        return self.evaluation_rows("train", rows)

    def evaluation_rows(self, part: str, rows: Rows) -> Batch:
        """These rows of a part, counted from 0."""
        raise NotImplementedError

    def epoch_batches(self, world_size: int) -> int:
        """Global batches until Lightning sees the end of an epoch: those that cover the training
        rows.
        """
        return -(-self.num_rows("train") // (self.batch_size * world_size))

    def train_dataloader(self) -> TrainingStream:
        rank, world_size = rank_and_world_size(self.trainer)

        def make_batch(batch: int) -> Batch:
            return self.training_rows(
                rank_rows(batch, batch_size=self.batch_size, rank=rank, world_size=world_size)
            )

        return TrainingStream(make_batch, self.epoch_batches(world_size))

    def val_dataloader(self) -> EvaluationRange:
        return self._evaluation("val")

    def test_dataloader(self) -> EvaluationRange:
        return self._evaluation("test")

    def _evaluation(self, part: str) -> EvaluationRange:
        rank, world_size = rank_and_world_size(self.trainer)
        total = self.num_rows(part)
        split: dict[str, Any] = {"batch_size": self.eval_batch_size, "world_size": world_size}

        def make_batch(batch: int) -> Batch:
            return self.evaluation_rows(part, rank_rows(batch, rank=rank, total=total, **split))

        return EvaluationRange(make_batch, batches_to_cover(total, **split))


class ShuffledRows(RowData):
    """Rows of a set that is all there: training takes them in a seeded order, another one in each
    epoch.

    Epochs follow each other without a seam, so every global batch is full and no row is left out.
    """

    parts: Mapping[str, Rows | range]
    """Numbers of the rows of each part; known after ``setup``."""

    def __init__(self, batch_size: int, eval_batch_size: int, seed: int) -> None:
        super().__init__(batch_size, eval_batch_size)
        self.seed = seed
        self.parts = {}

    def rows(self, numbers: Rows) -> Batch:
        raise NotImplementedError

    def num_rows(self, part: str) -> int:
        return len(self.parts[part])

    def training_rows(self, rows: Rows) -> Batch:
        return self.evaluation_rows("train", shuffled(rows, self.num_rows("train"), self.seed))

    def evaluation_rows(self, part: str, rows: Rows) -> Batch:
        numbers = self.parts[part]
        return self.rows(numbers.start + rows if isinstance(numbers, range) else numbers[rows])
