"""Which rows two ranks both remember: a bounded cache that each end works out from the requested ids alone.

The rank that asks for rows and the rank that owns them each keep one of these for the other. Both see the same
requests in the same order and so admit and evict the same rows without a word about it. The row that was asked for
longest ago goes first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_dct.embedding.placement import Int64Array


class Admission(NamedTuple):
    """What a request has changed.

    Attributes:
        slots: Shape ``[k]``: where each wanted row is kept.
        new: Shape ``[k]``, bool: which of them were not there before.
        evicted: Rows that had to go, shape ``[e]``.
        evicted_slots: Where they were, shape ``[e]``; some of the new rows may be there now.
    """

    slots: Int64Array
    new: np.typing.NDArray[np.bool_]
    evicted: Int64Array
    evicted_slots: Int64Array


# What a cache is made of, as saved.
CACHE_ARRAYS = ("rows", "slots", "row_at", "last_used", "counts")


class RowCache:
    """Rows, their slots, and when each was last asked for.

    Args:
        capacity: Most rows to keep. A request for more rows than that keeps all it asks for until the next.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._rows = np.empty(0, dtype=np.int64)  # ascending
        self._slots = np.empty(0, dtype=np.int64)  # of these rows
        self._row_at = np.empty(0, dtype=np.int64)  # by slot; -1 where it is free
        self._last_used = np.empty(0, dtype=np.int64)  # by slot
        self._counts = np.empty(0, dtype=np.int64)  # by slot: how often it was asked for
        self.requests = 0

    def __len__(self) -> int:
        return self._rows.size

    @property
    def num_slots(self) -> int:
        """Slots there must be room for: all that were ever used."""
        return self._row_at.size

    def contents(self) -> tuple[Int64Array, Int64Array]:
        """The rows, ascending, and their slots."""
        return self._rows, self._slots

    def counts(self) -> Int64Array:
        """How often each of the rows in :meth:`contents` was asked for since it came in."""
        return self._counts[self._slots]

    def halve_counts(self) -> None:
        """Let old requests count half."""
        self._counts >>= 1

    def holds(self, rows: Int64Array, slots: Int64Array) -> bool:
        """Whether rows are still where they were."""
        return bool((self._row_at[slots] == rows).all())

    def admit(self, wanted: Int64Array) -> Admission:
        """Make room for rows and say where they are.

        Args:
            wanted: Shape ``[k]``, ascending and distinct.
        """
        self.requests += 1
        found, hit = self._find(wanted)
        slots = np.full(wanted.size, -1, dtype=np.int64)
        slots[hit] = self._slots[found[hit]]
        self._last_used[slots[hit]] = self.requests
        misses = wanted[~hit]
        evicted_slots = self._oldest(len(self) + misses.size - max(self.capacity, wanted.size))
        evicted = self._row_at[evicted_slots]
        self._row_at[evicted_slots] = -1
        free = np.flatnonzero(self._row_at < 0)[: misses.size]
        taken = np.concatenate([free, np.arange(self.num_slots, self.num_slots + misses.size - free.size)])
        slots[~hit] = taken
        grown = misses.size - free.size
        if grown:
            self._row_at = np.concatenate([self._row_at, np.full(grown, -1, dtype=np.int64)])
            self._last_used = np.concatenate([self._last_used, np.zeros(grown, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(grown, dtype=np.int64)])
        self._row_at[taken] = misses
        self._last_used[taken] = self.requests
        self._counts[taken] = 0
        self._counts[slots] += 1
        if misses.size or evicted.size:
            kept = ~np.isin(self._rows, evicted, assume_unique=True) if evicted.size else slice(None)
            rows = np.concatenate([self._rows[kept], misses])
            order = np.argsort(rows, kind="stable")  # two ascending runs: a merge
            self._rows = rows[order]
            self._slots = np.concatenate([self._slots[kept], taken])[order]
        return Admission(slots, ~hit, evicted, evicted_slots)

    def state_dict(self) -> dict[str, Any]:
        """All of it, as integers and tensors."""
        return {
            "requests": self.requests,
            **{name: torch.from_numpy(getattr(self, f"_{name}").copy()) for name in CACHE_ARRAYS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.requests = int(state["requests"])
        for name in CACHE_ARRAYS:
            setattr(self, f"_{name}", state[name].numpy().copy())

    def _find(self, wanted: Int64Array) -> tuple[Int64Array, np.typing.NDArray[np.bool_]]:
        if not len(self):
            return np.zeros(wanted.size, dtype=np.int64), np.zeros(wanted.size, dtype=bool)
        found = np.minimum(np.searchsorted(self._rows, wanted), len(self) - 1)
        return found, self._rows[found] == wanted

    def _oldest(self, number: int) -> Int64Array:
        """The slots asked for longest ago, ascending; those of the present request are never among them."""
        if number <= 0:
            return np.empty(0, dtype=np.int64)
        used = np.flatnonzero(self._row_at >= 0)
        # The slot makes every key different, so that any way of partitioning finds the same ones on every machine.
        keys = self._last_used[used] * np.int64(2**31) + used
        return np.sort(used[np.argpartition(keys, number - 1)[:number]])
