"""Which rows two ranks both remember: a bounded cache that each end works out from the requested ids alone.

The rank that asks for rows and the rank that owns them each keep one of these for the other. Both see the same
requests in the same order and so admit and evict the same rows without a word about it. The row that was asked for
longest ago goes first. Once a cache is full a request takes time in proportion to its rows.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_dct.embedding.index import SlotIndex
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
        self._row_at = np.empty(0, dtype=np.int64)  # by slot; -1 where it is free
        self._last_used = np.empty(0, dtype=np.int64)  # by slot
        self._counts = np.empty(0, dtype=np.int64)  # by slot: how often it was asked for
        self.requests = 0
        self._derive()

    def _derive(self) -> None:
        """What follows from the slots: the index of rows, the free slots, and the queue of those to go."""
        self._index = SlotIndex(self._row_at)
        self._free = np.flatnonzero(self._row_at < 0)
        # Slots and the times they were asked for, those asked for longest ago first, and of these the lowest. An entry
        # whose slot was asked for again, or is another row's by now, is passed over.
        used = np.flatnonzero(self._row_at >= 0)
        order = used[np.argsort(self._last_used[used], kind="stable")]
        self._queue = deque([(order, self._last_used[order])])
        self._queued = order.size

    def __len__(self) -> int:
        return self.num_slots - self._free.size

    @property
    def num_slots(self) -> int:
        """Slots there must be room for: all that were ever used."""
        return self._row_at.size

    def contents(self) -> tuple[Int64Array, Int64Array]:
        """The rows, ascending, and their slots."""
        used = np.flatnonzero(self._row_at >= 0)
        slots = used[np.argsort(self._row_at[used])]
        return self._row_at[slots], slots

    def counts(self) -> Int64Array:
        """How often each of the rows in :meth:`contents` was asked for since it came in."""
        return self._counts[self.contents()[1]]

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
        slots = self._index.find(wanted, self._row_at)
        new = slots < 0
        self._last_used[slots[~new]] = self.requests
        misses = wanted[new]
        evicted_slots = self._oldest(len(self) + misses.size - max(self.capacity, wanted.size))
        evicted = self._row_at[evicted_slots]
        self._row_at[evicted_slots] = -1
        free = np.sort(np.concatenate([self._free, evicted_slots]))
        grown = max(misses.size - free.size, 0)
        taken = np.concatenate([free[: misses.size], np.arange(self.num_slots, self.num_slots + grown)])
        self._free = free[misses.size :]
        slots[new] = taken
        if grown:
            self._row_at = np.concatenate([self._row_at, np.full(grown, -1, dtype=np.int64)])
            self._last_used = np.concatenate([self._last_used, np.zeros(grown, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(grown, dtype=np.int64)])
        self._row_at[taken] = misses
        self._last_used[taken] = self.requests
        self._counts[taken] = 0
        self._counts[slots] += 1
        self._index.insert(misses, taken, self._row_at)
        self._queue.append((np.sort(slots), np.full(slots.size, self.requests)))
        self._queued += slots.size
        if self._queued > 4 * self.num_slots + 1:  # most of it is out of date
            self._derive()
        return Admission(slots, new, evicted, evicted_slots)

    def state_dict(self) -> dict[str, Any]:
        """All of it, as integers and tensors."""
        rows, slots = self.contents()
        arrays = (rows, slots, self._row_at, self._last_used, self._counts)
        return {
            "requests": self.requests,
            **{name: torch.from_numpy(array.copy()) for name, array in zip(CACHE_ARRAYS, arrays, strict=True)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.requests = int(state["requests"])
        self._row_at, self._last_used, self._counts = (state[name].numpy().copy() for name in CACHE_ARRAYS[2:])
        self._derive()

    def _oldest(self, number: int) -> Int64Array:
        """The slots asked for longest ago, ascending; those of the present request are never among them."""
        oldest = [np.empty(0, dtype=np.int64)]
        while number > 0:
            slots, times = self._queue.popleft()
            # Most entries at the head are due: what is behind twice as many is not looked at yet.
            piece = min(2 * number, slots.size)
            due = np.flatnonzero(self._last_used[slots[:piece]] == times[:piece])[:number]
            seen = int(due[-1]) + 1 if due.size == number else piece
            if seen < slots.size:
                self._queue.appendleft((slots[seen:], times[seen:]))
            self._queued -= seen
            oldest.append(slots[due])
            number -= due.size
        return np.sort(np.concatenate(oldest))
