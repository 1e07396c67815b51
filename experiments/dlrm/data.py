"""Click logs like Criteo's, made up as they are read, with a teacher whose own score is the best
there is.

Row ``i`` is a pure function of ``(seed, i)``: 13 counts with log-normal tails and 26 categories
with Zipf ids, some of each missing, and a click drawn from the teacher's probability. The teacher
knows nothing but what the row shows, so a perfect model would reach the area under the ROC curve of
its probabilities.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from counter_random import UInt64Array, hash_counters, normal, uniform, uniform_pair
from streams import Batch, RowData, Rows, check_at_least

NUM_DENSE = 13
MISSING_ID = 0
"""Row of every table that stands for a missing category."""

FIRST_ROW = {"train": 0, "val": 2**40, "test": 2**41, "calibration": 2**42}
"""The first row of each part of the endless log, far enough apart never to overlap."""

# The use of a hashed number is its first counter, so that no two uses share their bits.
_COUNT, _COUNT_MISSING, _CATEGORY, _CLICK, _WEIGHT, _FACTORS, _RATES, _DENSE_WEIGHT = range(8)
_FACTOR_DIM = 4
_CALIBRATION_ROWS = 16384


class ClickTeacher:
    """Generates rows and their true click probabilities.

    The logit is a sum of a weighted sum of the dense features, a weight for each category value,
    and the dot products of all pairs of the values' factor vectors (4 entries each). Weights and
    factors are hashed from ``(seed, table, id)``, so even Criteo's 33 million values would take no
    memory.

    Args:
        table_rows: Ids a table, the missing one included; at least 2 each.
        seed: Chooses the teacher and the rows.
        zipf_exponent: The ``k``-th most frequent id comes with probability about ``k **
            -zipf_exponent``.
        missing_rate: Mean fraction of missing values; each column has a rate of its own between 0
            and twice that.
        click_rate: Mean click probability.
        dense_scale: Standard deviation that the dense features add to the logit.
        category_scale: The same of the category weights.
        pair_scale: The same of the pairs of categories.
    """

    def __init__(
        self,
        table_rows: Sequence[int],
        seed: int = 0,
        zipf_exponent: float = 1.05,
        missing_rate: float = 0.1,
        click_rate: float = 0.25,
        dense_scale: float = 0.5,
        category_scale: float = 1.0,
        pair_scale: float = 0.5,
    ) -> None:
        if not table_rows or min(table_rows) < 2:
            raise ValueError(
                f"data.table_rows={list(table_rows)}: every table needs 2 rows or more (one is for"
                " missing values)"
            )
        if not 0 <= missing_rate <= 0.5:
            raise ValueError(f"data.missing_rate={missing_rate}: must lie between 0 and 0.5")
        if not 0 < click_rate < 1:
            raise ValueError(f"data.click_rate={click_rate}: must lie between 0 and 1")
        if zipf_exponent < 0:
            raise ValueError(f"data.zipf_exponent={zipf_exponent}: must not be negative")
        self.table_rows = np.asarray(table_rows, dtype=np.int64)
        self.seed = seed
        self.zipf_exponent = zipf_exponent
        self.dense_scale = dense_scale
        self.category_scale = category_scale
        self.pair_scale = pair_scale

        num_tables = len(table_rows)
        columns = np.arange(max(NUM_DENSE, num_tables))
        self._dense_rates = (
            2 * missing_rate * uniform(hash_counters(seed, _RATES, 0, columns[:NUM_DENSE]))
        )
        self._table_rates = (
            2 * missing_rate * uniform(hash_counters(seed, _RATES, 1, columns[:num_tables]))
        )
        # Counts from a handful to thousands, as in Criteo's thirteen columns.
        self._log_mean = 0.5 + 3.0 * uniform(hash_counters(seed, _RATES, 2, columns[:NUM_DENSE]))
        self._log_deviation = 0.8 + 0.8 * uniform(
            hash_counters(seed, _RATES, 3, columns[:NUM_DENSE])
        )
        self._dense_weights = normal(hash_counters(seed, _DENSE_WEIGHT, columns[:NUM_DENSE]))
        self._dense_weights /= np.linalg.norm(self._dense_weights)
        self._bias = 0.0
        self._bias = self._find_bias(click_rate)

    def _find_bias(self, click_rate: float) -> float:
        """Bisect for the bias at which the mean probability over some unused rows is
        ``click_rate``.
        """
        rows = np.arange(_CALIBRATION_ROWS, dtype=np.int64) + FIRST_ROW["calibration"]
        logits = self.logits(*self.features(rows))
        low = -30.0
        high = 30.0
        for _ in range(50):
            middle = (low + high) / 2
            if _sigmoid(logits + middle).mean() < click_rate:
                low = middle
            else:
                high = middle
        return low

    def features(
        self, rows: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """The dense features ``[n, 13]`` of rows ``[n]``, and their category ids ``[n, tables]``,
        missing ones 0.

        A dense feature is ``log(1 + count)``, 0 for a missing count, as the reference prepares
        Criteo.
        """
        return self._dense(rows[:, None]), self._categories(rows[:, None])

    def _bits(
        self, use: int, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]
    ) -> UInt64Array:
        return hash_counters(self.seed, use, rows, columns)

    def _dense(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        columns = np.arange(NUM_DENSE)
        latent = normal(self._bits(_COUNT, rows, columns))
        counts = np.floor(np.exp(self._log_mean + self._log_deviation * latent))
        counts[uniform(self._bits(_COUNT_MISSING, rows, columns)) < self._dense_rates] = 0
        return np.log1p(counts)

    def _categories(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        position, missing = uniform_pair(
            self._bits(_CATEGORY, rows, np.arange(len(self.table_rows)))
        )
        # The inverse of the cumulative distribution of x ** -exponent on [1, values + 1): no table
        # of frequencies.
        values = self.table_rows - 1
        power = 1 - self.zipf_exponent
        if abs(power) < 1e-9:
            rank = (values + 1.0) ** position
        else:
            rank = (1 + position * ((values + 1.0) ** power - 1)) ** (1 / power)
        ids = np.clip(rank.astype(np.int64), 1, values)
        ids[missing < self._table_rates] = MISSING_ID
        return ids

    def logits(
        self, dense: npt.NDArray[np.float64], categories: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """Give the true logits ``[n]`` of features as :meth:`features` makes them."""
        tables = np.arange(len(self.table_rows))
        from_dense = ((dense - self._log_mean) / self._log_deviation) @ self._dense_weights

        # Uniform on [-sqrt(3), sqrt(3)): zero mean, unit variance.
        weights = (
            2 * uniform(hash_counters(self.seed, _WEIGHT, tables, categories)) - 1
        ) * np.sqrt(3)
        from_categories = weights.sum(axis=1) / np.sqrt(len(tables))

        bits = hash_counters(self.seed, _FACTORS, tables, categories)
        total = 0.0
        squares = 0.0
        for piece in range(_FACTOR_DIM):
            sixteen = (bits >> np.uint64(16 * piece)) & np.uint64(0xFFFF)
            factor = (sixteen.astype(np.float64) * 2.0**-15 - 1) * np.sqrt(3)
            total += factor.sum(axis=1) ** 2
            squares += (factor**2).sum(axis=1)
        # The sum over pairs i < j of f_i . f_j, without the pairs.
        num_pairs = max(1, len(tables) * (len(tables) - 1) // 2)
        from_pairs = 0.5 * (total - squares) / np.sqrt(num_pairs * _FACTOR_DIM)

        return (
            self._bias
            + self.dense_scale * from_dense
            + self.category_scale * from_categories
            + self.pair_scale * from_pairs
        )

    def batch(self, rows: npt.NDArray[np.int64]) -> Batch:
        """Make the rows with these numbers, as a batch of tensors.

        ``label`` is 0 or 1, and ``probability`` is the truth that no model is shown.
        """
        dense, categories = self.features(rows)
        probability = _sigmoid(self.logits(dense, categories))
        label = uniform(hash_counters(self.seed, _CLICK, rows)) < probability
        return {
            "dense": torch.from_numpy(dense.astype(np.float32)),
            "categorical": torch.from_numpy(categories),
            "label": torch.from_numpy(label.astype(np.float32)),
            "probability": torch.from_numpy(probability.astype(np.float32)),
        }


def _sigmoid(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return 1 / (1 + np.exp(-logits))


class SyntheticClicks(RowData):
    """An endless click log: fresh rows in every epoch, the same rows for any number of ranks.

    Batches are those of :meth:`ClickTeacher.batch`. Training, validation and test are disjoint
    ranges of rows.

    Args:
        table_rows: Rows of each embedding table.
        batch_size: Training rows a rank.
        eval_batch_size: Validation rows a rank.
        batches_per_epoch: Training batches between two validations.
        eval_rows: Rows for validation, and again for test.
        seed: Chooses the teacher and the rows.
        teacher: Further settings of :class:`ClickTeacher`.
    """

    num_dense = NUM_DENSE

    def __init__(
        self,
        table_rows: Sequence[int],
        batch_size: int = 128,
        eval_batch_size: int = 1024,
        batches_per_epoch: int = 1500,
        eval_rows: int = 50_000,
        seed: int = 0,
        **teacher: Any,
    ) -> None:
        super().__init__(batch_size, eval_batch_size)
        check_at_least(1, batches_per_epoch=batches_per_epoch, eval_rows=eval_rows)
        self.table_rows = list(table_rows)
        self.batches_per_epoch = batches_per_epoch
        self.eval_rows = eval_rows
        self.teacher = ClickTeacher(self.table_rows, seed, **teacher)

    def num_rows(self, part: str) -> int:
        """Rows of an evaluation; training has no end."""
        return self.eval_rows

    def epoch_batches(self, world_size: int) -> int:
        return self.batches_per_epoch

    def evaluation_rows(self, part: str, rows: Rows) -> Batch:
        return self.teacher.batch(rows + FIRST_ROW[part])
