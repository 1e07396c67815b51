"""Which rank owns which row of tables whose ids are any whole numbers: a hash of table and id says.

A row's *key* is one whole number below ``2**63``: its table in the highest bits, its id in the others. Keys are what
places are in :class:`~lightning_dct.embedding.placement.Placement`: messages name rows by them, in ascending order,
which is by table first. An id that needs more bits than there are is hashed to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightning_dct.embedding.initial import mix
from lightning_dct.embedding.placement import Int64Array, Placement

# Ids of a growing table are below this; it is the number of rows that such a table is said to have.
ID_SPACE = 2**63
_KEY_BITS = 63


@dataclass(frozen=True)
class HashedPlacement(Placement):
    """Where every row lives that there may ever be, the same on every rank; make it with :func:`place_by_hash`."""

    @cached_property
    def _id_bits(self) -> int:
        return _KEY_BITS - (len(self.table_rows) - 1).bit_length()

    @cached_property
    def owned_rows(self) -> tuple[int, ...]:
        """All keys are below this, on every rank."""
        return (len(self.table_rows) << self._id_bits,) * self.world_size

    def locate(self, tables: Int64Array, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The owners and the keys of ids of tables; all shape ``[n]``."""
        hashed = (_hash(rows) >> np.uint64(64 - self._id_bits)).astype(np.int64)
        keys = tables << self._id_bits | np.where(rows >> self._id_bits == 0, rows, hashed)
        return (_hash(keys) % np.uint64(self.world_size)).astype(np.int64), keys

    def tables_of(self, rank: int, places: Int64Array) -> Int64Array:
        """Which table each key belongs to, shape ``[n]``."""
        return places >> self._id_bits

    def rows_of(self, rank: int, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The tables and ids of keys, all shape ``[n]``; :meth:`locate` leads back to the keys."""
        return self.tables_of(rank, places), places & ((1 << self._id_bits) - 1)


def place_by_hash(num_tables: int, world_size: int) -> HashedPlacement:
    """The placement of growing tables."""
    spaces = (ID_SPACE,) * num_tables
    return HashedPlacement(world_size, spaces, spaces, (0,) * num_tables)


def _hash(numbers: Int64Array) -> npt.NDArray[np.uint64]:
    return mix(numbers.astype(np.uint64))
