"""Gives every rank a row's owner, its place there and its initial value, from its table and number.

A table of fixed size with more rows than a rank's share is cut into blocks, which the ranks own in
turn. So no rank has all of it, and its frequent rows, which most vocabularies put first, do not all
belong to one rank. The other tables are not cut. Each of them, largest first, is assigned to the
rank with the least load::

    table 0 (large)     | block 0 | block 1 | block 2 | block 3 | ...      blocks of equal size, in turn
                           rank 0    rank 1    rank 0    rank 1
    table 1 (small)     | one block |                                      as many rows as the table has
                           rank 1

On its owner every row has a *place*: the owner's rows of table 0 in ascending order, then those of
table 1, and so on.

Rows of growing tables belong to ranks by a hash. Their places are *keys*: whole numbers below
``2**63`` with the table in the highest bits and the id in the others. An id that needs more bits
than there are is hashed to them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lightning_dct.kernels import compiled

Int64Array = npt.NDArray[np.int64]

# Blocks of a cut table that each rank gets: enough to spread the frequent rows, few enough to list.
BLOCKS_PER_RANK = 16
# Ids of a growing table are below this, which is the number of rows that such a table is said to
# have.
ID_SPACE = 2**63
_KEY_BITS = 63
# Rows that are filled or copied at a time, so that no second copy of a table ever exists.
ROWS_AT_A_TIME = 1 << 16
# 2 ** 64 over the golden ratio, odd.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def in_parts(start: int, stop: int) -> Iterator[Int64Array]:
    """The places from ``start`` to ``stop``, at most ``ROWS_AT_A_TIME`` at a time."""
    for low in range(start, stop, ROWS_AT_A_TIME):
        yield np.arange(low, min(low + ROWS_AT_A_TIME, stop))


@dataclass(frozen=True)
class RowOwners:
    """The owner and the place of every row, the same on every rank."""

    # Whether places lie below `owned_rows`. Keys of growing tables leave no bits for the owner.
    has_numbers: ClassVar[bool] = True

    world_size: int
    table_rows: tuple[int, ...]  # rows of each table
    block_rows: tuple[int, ...]  # rows per block of each table; all rows where the table is not cut
    first_rank: tuple[int, ...]  # owner of each table's first block

    def ranges(self, rank: int) -> Iterator[tuple[int, int, int, int]]:
        """The rows a rank owns: table, first row, end, and the first row's place, which ascends."""
        place = 0
        for table, (rows, block) in enumerate(zip(self.table_rows, self.block_rows, strict=True)):
            first = (rank - self.first_rank[table]) % self.world_size
            for start in range(first * block, rows, self.world_size * block):
                stop = min(start + block, rows)
                yield table, start, stop, place
                place += stop - start

    @cached_property
    def owned_rows(self) -> tuple[int, ...]:
        """The number of rows that each rank owns, of all tables together; places are below it."""
        return tuple(self._bases[:, -1].tolist())

    @cached_property
    def _bases(self) -> Int64Array:
        """Place of each rank's first row of each table, shape ``[world size, tables + 1]``; the
        last is the end.
        """
        bases = np.zeros((self.world_size, len(self.table_rows) + 1), dtype=np.int64)
        for rank in range(self.world_size):
            for table, start, stop, _ in self.ranges(rank):
                bases[rank, table + 1] += stop - start
        return bases.cumsum(axis=1)

    @cached_property
    def _blocks(self) -> tuple[Int64Array, Int64Array]:
        return np.array(self.block_rows, dtype=np.int64), np.array(self.first_rank, dtype=np.int64)

    def locate(self, tables: Int64Array, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The owners and the places there of rows of tables; all shape ``[n]``."""
        sizes, first = self._blocks
        if self.block_rows == self.table_rows:  # no table is cut
            return first[tables], self._bases[first, np.arange(first.size)][tables] + rows
        block, within = np.divmod(rows, sizes[tables])
        owner = (first[tables] + block) % self.world_size
        place = self._bases[owner, tables] + block // self.world_size * sizes[tables] + within
        return owner, place.astype(np.int64, copy=False)

    def tables_of(self, rank: int, places: Int64Array) -> Int64Array:
        """The table of each of a rank's places, shape ``[n]``."""
        return np.searchsorted(self._bases[rank], places, side="right") - 1

    def rows_of(self, rank: int, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The tables and rows at places of a rank, all shape ``[n]``: the inverse of
        :meth:`locate`.
        """
        tables = self.tables_of(rank, places)
        sizes, first = self._blocks
        block, within = np.divmod(places - self._bases[rank, tables], sizes[tables])
        rows: Int64Array = (
            block * self.world_size + (rank - first[tables]) % self.world_size
        ) * sizes[tables] + within
        return tables, rows

    def numbers_of(self, rank: int) -> Tensor:
        """Which of the rows of all tables, one table after the other, a rank owns, by place:
        int64.
        """
        tables, rows = self.rows_of(rank, np.arange(self.owned_rows[rank]))
        return torch.from_numpy(np.cumsum([0, *self.table_rows])[tables] + rows)


def place_tables(table_rows: Sequence[int], world_size: int) -> RowOwners:
    """Balance rows (memory) and look-ups (traffic, the same of each table) over the ranks.

    All tables of a module have the same dimension, so rows measure their bytes.
    """
    total_rows = sum(table_rows)
    block_rows = list(table_rows)
    first_rank = [0] * len(table_rows)
    # Shares of all rows and of all look-ups: of each table, and of each rank.
    shares = np.array([[rows / total_rows, 1 / len(table_rows)] for rows in table_rows])
    loads = np.zeros((world_size, 2))
    cut = [
        table
        for table, rows in enumerate(table_rows)
        if rows * world_size > total_rows and rows >= world_size > 1
    ]
    for turn, table in enumerate(cut):
        # Each cut table starts on another rank, because its first block has the most frequent rows.
        first_rank[table] = turn % world_size
        block_rows[table] = -(-table_rows[table] // (world_size * BLOCKS_PER_RANK))
        loads += shares[table] / world_size
    whole = set(range(len(table_rows))) - set(cut)
    for table in sorted(whole, key=lambda table: (-shares[table].max(), table)):
        # The least load with it, of ranks with the same the fewest rows.
        first_rank[table] = int(np.lexsort((loads[:, 0], (loads + shares[table]).max(axis=1)))[0])
        loads[first_rank[table]] += shares[table]
    return RowOwners(world_size, tuple(table_rows), tuple(block_rows), tuple(first_rank))


@dataclass(frozen=True)
class HashedOwners(RowOwners):
    """The owner and the key of every possible row of growing tables; see :func:`place_by_hash`."""

    has_numbers: ClassVar[bool] = False

    @cached_property
    def _id_bits(self) -> int:
        return _KEY_BITS - (len(self.table_rows) - 1).bit_length()

    @cached_property
    def owned_rows(self) -> tuple[int, ...]:
        """The number of keys, the same for every rank."""
        return (len(self.table_rows) << self._id_bits,) * self.world_size

    def locate(self, tables: Int64Array, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The owners and the keys of ids of tables; all shape ``[n]``."""
        hashed = (mix(rows.astype(np.uint64)) >> np.uint64(64 - self._id_bits)).astype(np.int64)
        keys = tables << self._id_bits | np.where(rows >> self._id_bits == 0, rows, hashed)
        return (mix(keys.astype(np.uint64)) % np.uint64(self.world_size)).astype(np.int64), keys

    def tables_of(self, rank: int, places: Int64Array) -> Int64Array:
        """The table of each key, shape ``[n]``."""
        return places >> self._id_bits

    def rows_of(self, rank: int, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The tables and ids of keys, all shape ``[n]``; :meth:`locate` leads back to the keys."""
        return self.tables_of(rank, places), places & ((1 << self._id_bits) - 1)


def place_by_hash(num_tables: int, world_size: int) -> HashedOwners:
    """The placement of growing tables."""
    spaces = (ID_SPACE,) * num_tables
    return HashedOwners(world_size, spaces, spaces, (0,) * num_tables)


class UnmadeRows(nn.parameter.UninitializedParameter):
    """Rows before :meth:`~lightning_dct.ShardedEmbeddingBags.materialize`, which can be frozen
    already.
    """

    _allowed_methods: ClassVar[Any] = [
        *vars(nn.parameter.UninitializedTensorMixin)["_allowed_methods"],  # type: ignore[attr-defined]
        Tensor.requires_grad_,
    ]


def initial_rows(
    seed: int,
    tables: Int64Array,
    rows: Int64Array,
    bounds: Sequence[float],
    dim: int,
    centres: Sequence[float] | None = None,
) -> Tensor:
    """Rows ``rows`` of ``tables``, both shape ``[n]``: fp32 ``[n, dim]``, uniform on ``[-bound,
    bound)`` of the table.

    ``bounds`` has an entry for each table, and so has ``centres``, which are added. The owner's
    row, and the copy on a rank that requests it for the first time, both start from this value. So
    they differ only by the changes of training.
    """
    bound_of = np.array(bounds, dtype=np.float32)[tables]
    state = np.full(1, seed % 2**64, dtype=np.uint64)
    for counter in (tables, rows):
        state = mix(state + (counter.astype(np.uint64) + np.uint64(1)) * GOLDEN)
    if (kernel := compiled("cpu", loops="numba_rows")) is not None:
        values = np.empty((rows.size, dim), dtype=np.float32)
        kernel.fill_uniform(values, state, bound_of)
    else:
        state = mix(state[:, None] + np.arange(1, dim + 1, dtype=np.uint64) * GOLDEN)
        # An fp32 holds 24 bits exactly, so only the last product rounds.
        values = (state >> np.uint64(40)).astype(np.float32) * np.float32(2**-23) - np.float32(1)
        values *= bound_of[:, None]
    if centres is not None and any(centres):
        values += np.array(centres, dtype=np.float32)[tables][:, None]
    return torch.from_numpy(values)


def mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash 64-bit numbers to others, one to one, in place.

    This is the finaliser of SplitMix64 (Steele, Lea and Flood, *Fast splittable pseudorandom number
    generators*, OOPSLA 2014).
    """
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state
