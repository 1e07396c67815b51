"""Which rank owns which rows of which table: whole tables where they fit, blocks of rows where they do not.

A table with more rows than a rank's share is cut into blocks that go round the ranks in turn, so that no rank ever
holds all of it and its often-used rows, which most vocabularies put first, do not all land on one rank. The other
tables stay whole and go, largest first, to the rank that has the least.

    table 0 (large)     | block 0 | block 1 | block 2 | block 3 | ...      blocks of equal size, in turn
                           rank 0    rank 1    rank 0    rank 1
    table 1 (small)     | one block |                                      as many rows as the table has
                           rank 1

On its owner every row has a *place*: the owner's rows of table 0 in ascending order, then those of table 1, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

# Blocks of a cut table that each rank gets: enough to spread the often-used rows, few enough to list.
BLOCKS_PER_RANK = 16


class RowRange(NamedTuple):
    """Rows that lie next to each other in their table and on their owner.

    Attributes:
        table: The table.
        start: First row in the table.
        stop: One past the last.
        place: Place of the first row on its owner.
    """

    table: int
    start: int
    stop: int
    place: int


@dataclass(frozen=True)
class Placement:
    """Where every row lives. The same on every rank.

    Attributes:
        world_size: Number of ranks.
        table_rows: Rows of each table.
        block_rows: Rows of each table's blocks; all of the table's rows where it is not cut.
        first_rank: Owner of each table's first block.
    """

    world_size: int
    table_rows: tuple[int, ...]
    block_rows: tuple[int, ...]
    first_rank: tuple[int, ...]

    def ranges(self, rank: int) -> list[RowRange]:
        """The rows a rank owns, by ascending place."""
        found, place = [], 0
        for table, (rows, block) in enumerate(zip(self.table_rows, self.block_rows, strict=True)):
            first = (rank - self.first_rank[table]) % self.world_size
            for start in range(first * block, rows, self.world_size * block):
                stop = min(start + block, rows)
                found.append(RowRange(table, start, stop, place))
                place += stop - start
        return found

    @cached_property
    def owned_rows(self) -> tuple[int, ...]:
        """How many rows each rank owns, of all tables together."""
        return tuple(sum(r.stop - r.start for r in self.ranges(rank)) for rank in range(self.world_size))

    @cached_property
    def _bases(self) -> Int64Array:
        """Place of each rank's first row of each table, shape ``[world size, tables + 1]``; the last is the end."""
        bases = np.zeros((self.world_size, len(self.table_rows) + 1), dtype=np.int64)
        for rank in range(self.world_size):
            for table, start, stop, _ in self.ranges(rank):
                bases[rank, table + 1] += stop - start
        return bases.cumsum(axis=1)

    @cached_property
    def _blocks(self) -> tuple[Int64Array, Int64Array]:
        return np.array(self.block_rows, dtype=np.int64), np.array(self.first_rank, dtype=np.int64)

    def locate(self, tables: Int64Array, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Where rows live.

        Args:
            tables: Shape ``[n]``: the table of each row.
            rows: Shape ``[n]``: the row in its table.

        Returns:
            The owners and the places there, both shape ``[n]``.
        """
        sizes, first = self._blocks
        block, within = np.divmod(rows, sizes[tables])
        owner = (first[tables] + block) % self.world_size
        place = (self._bases[owner, tables] + block // self.world_size * sizes[tables] + within).astype(
            np.int64, copy=False
        )
        return owner, place

    def tables_on(self, rank: int) -> Int64Array:
        """The tables a rank owns rows of, ascending."""
        return np.flatnonzero(np.diff(self._bases[rank]))

    def tables_of(self, rank: int, places: Int64Array) -> Int64Array:
        """Which table each of a rank's places belongs to, shape ``[n]``."""
        return np.searchsorted(self._bases[rank], places, side="right") - 1

    def rows_of(self, rank: int, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The tables and the rows at some places of a rank, both shape ``[n]``: what :meth:`locate` undoes."""
        tables = self.tables_of(rank, places)
        sizes, first = self._blocks
        block, within = np.divmod(places - self._bases[rank, tables], sizes[tables])
        rows: Int64Array = (block * self.world_size + (rank - first[tables]) % self.world_size) * sizes[tables] + within
        return tables, rows


def place_tables(
    table_rows: Sequence[int], world_size: int, expected_lookups: Sequence[float] | None = None
) -> Placement:
    """Balance rows (memory) and look-ups (traffic) over the ranks.

    All tables of a module have one dimension, so rows measure their bytes.

    Args:
        table_rows: Rows of each table.
        world_size: Number of ranks.
        expected_lookups: Look-ups a sample of each table, in any unit; one each when None.
    """
    total_rows = sum(table_rows)
    lookups = [1.0] * len(table_rows) if expected_lookups is None else [float(number) for number in expected_lookups]
    total_lookups = sum(lookups) or 1.0
    block_rows = list(table_rows)
    first_rank = [0] * len(table_rows)
    memory, traffic = [0.0] * world_size, [0.0] * world_size
    weights = [max(rows / total_rows, number / total_lookups) for rows, number in zip(table_rows, lookups, strict=True)]
    cut = [table for table, rows in enumerate(table_rows) if rows * world_size > total_rows and rows >= world_size > 1]
    for turn, table in enumerate(cut):
        # Each cut table begins on another rank, because the first block has the rows that are used most.
        first_rank[table] = turn % world_size
        block_rows[table] = -(-table_rows[table] // (world_size * BLOCKS_PER_RANK))
        for rank in range(world_size):
            memory[rank] += table_rows[table] / total_rows / world_size
            traffic[rank] += lookups[table] / total_lookups / world_size
    whole = sorted(set(range(len(table_rows))) - set(cut), key=lambda table: (-weights[table], table))
    for table in whole:
        more_memory, more_traffic = table_rows[table] / total_rows, lookups[table] / total_lookups
        rank = min(
            range(world_size),
            key=lambda rank: (max(memory[rank] + more_memory, traffic[rank] + more_traffic), memory[rank], rank),
        )
        first_rank[table] = rank
        memory[rank] += more_memory
        traffic[rank] += more_traffic
    return Placement(world_size, tuple(table_rows), tuple(block_rows), tuple(first_rank))
