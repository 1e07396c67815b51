"""Who reads which rows: global batch ``j`` is the same set of rows, however many ranks share it.

With ``b`` rows a rank and ``W`` ranks, rank ``r`` takes rows ``[(j * W + r) * b, (j * W + r + 1) * b)`` of a
global order. As long as ``b * W`` stays the same, so do the rows of every optimizer step, and runs with 1, 2 or 4
processes can be compared. The loaders here are plain iterables: Lightning wraps no sampler around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Batch = dict[str, Any]


def rank_rows(
    batch: int, *, batch_size: int, rank: int, world_size: int, total: int | None = None
) -> npt.NDArray[np.int64]:
    """Give the rows that one rank reads in one global batch.

    Args:
        batch: Index of the global batch, from 0.
        batch_size: Rows a rank.
        rank: This rank.
        world_size: Number of ranks.
        total: Rows there are, where the order ends; the last batch is then shorter, on some ranks even empty.

    Returns:
        int64 row numbers, ``[batch_size]`` or fewer at the end of a bounded order.
    """
    start = (batch * world_size + rank) * batch_size
    stop = start + batch_size
    if total is not None:
        start, stop = min(start, total), min(stop, total)
    return np.arange(start, stop, dtype=np.int64)


def batches_to_cover(total: int, *, batch_size: int, world_size: int) -> int:
    """Count the global batches that cover ``total`` rows: the same on every rank.

    Raises:
        ValueError: If some rank would read nothing at all, which leaves metrics that gather rows without any.
    """
    if total <= (world_size - 1) * batch_size:
        raise ValueError(
            f"{total} rows of evaluation data leave some of {world_size} ranks without any at "
            f"data.eval_batch_size={batch_size}; lower data.eval_batch_size or give more rows."
        )
    return -(-total // (batch_size * world_size))


def rank_and_world_size(trainer: Any) -> tuple[int, int]:
    """Read from a Trainer which share of the data this rank reads, and of how many; ``(0, 1)`` where there is none.

    The ranks of a pipeline all read the same share.
    """
    if trainer is None:
        return 0, 1
    # Strategies of a single process have none.
    share = getattr(trainer, "distributed_sampler_kwargs", None)
    return (trainer.global_rank, trainer.world_size) if share is None else (share["rank"], share["num_replicas"])


def shuffled(places: npt.NDArray[np.int64], size: int, seed: int) -> npt.NDArray[np.int64]:
    """The rows at some places of an endless order, in which each ``size`` places in a row hold every row once."""
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

    Args:
        make_batch: Builds this rank's part of global batch ``j``; a pure function of ``j``.
        batches_per_epoch: Where Lightning shall see the end of an epoch. The next epoch continues the sequence.
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
            # Before the yield: a checkpoint written while this batch is in use must continue after it.
            self._position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The position, which Lightning keeps in its checkpoints."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a saved position."""
        self._position = state["position"]


class EvaluationRange:
    """A fixed number of batches, the same on every pass.

    Args:
        make_batch: Builds this rank's part of global batch ``j``; a pure function of ``j``.
        num_batches: Number of global batches.
    """

    def __init__(self, make_batch: Callable[[int], Batch], num_batches: int) -> None:
        self._make_batch = make_batch
        self._num_batches = num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        return (self._make_batch(batch) for batch in range(self._num_batches))
