"""The directory of growing tables on one owner: which keys have rows, and in which slots.

A key gets a row when it was requested in ``admit_after`` look-ups. All ranks' requests in one look-up count as one, so
the count does not depend on the number of ranks. A new row replaces the least recently requested one. Keys with rows
are in one :class:`~lightning_dct.embedding.cache.RowCache`, and keys that are being counted in another, of equal size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_dct.embedding.cache import CACHE_ARRAYS, RowCache
from lightning_dct.embedding.placement import Int64Array

# The names of a directory's caches.
PARTS = ("rows", "counted")


class Changed(NamedTuple):
    """The changes that a look-up causes."""

    keys: Int64Array  # shape `[k]`, ascending: the keys with a new row
    slots: Int64Array  # shape `[k]`: the slots of the new rows
    evicted: int  # number of evicted rows


class RowDirectory:
    """At most ``capacity`` keys with rows, and as many that are being counted."""

    def __init__(self, capacity: int, admit_after: int) -> None:
        self.admit_after = admit_after
        self.rows, self.counted = RowCache(capacity), RowCache(capacity)

    def find(self, keys: Int64Array) -> Int64Array:
        """The slots of keys, ``[k]``, -1 where there is no row."""
        return self.rows.find(keys)

    def request(self, keys: Int64Array) -> Changed:
        """Count a look-up of keys, ``[k]``, ascending and distinct, and make rows for those that are due.

        If these are more than fit, the first keys get rows.
        """
        there = self.find(keys) >= 0
        due = keys[~there]
        if self.admit_after > 1:
            due = due[self.counted.counts_at(self.counted.admit(due).slots) >= self.admit_after]
        wanted = np.sort(np.concatenate([keys[there], due[: self.rows.capacity - int(there.sum())]]))
        admission = self.rows.admit(wanted)
        return Changed(wanted[admission.new], admission.slots[admission.new], admission.evicted.size)

    def state_dict(self) -> dict[str, Any]:
        """Both caches."""
        return {part: getattr(self, part).state_dict() for part in PARTS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        for part in PARTS:
            getattr(self, part).load_state_dict(state[part])

    def take_over(self, states: Sequence[Mapping[str, Any]], is_own: Callable[[Int64Array], Any]) -> None:
        """Merge the states of all owners of another world size: keep the newest keys of this owner."""
        for part in PARTS:
            cache = getattr(self, part)
            cache.load_state_dict(_newest([state[part] for state in states], cache.capacity, is_own))


def _newest(states: Sequence[Mapping[str, Any]], capacity: int, is_own: Callable[[Int64Array], Any]) -> dict[str, Any]:
    """Merge the states of several caches: the most recently requested of this owner's rows."""
    rows, last_used, counts = (np.concatenate([state[name].numpy() for state in states]) for name in CACHE_ARRAYS)
    own = np.flatnonzero((rows >= 0) & is_own(rows))
    newest = own[np.lexsort((rows[own], -last_used[own]))[:capacity]]
    arrays = zip(CACHE_ARRAYS, (rows, last_used, counts), strict=True)
    # All owners count the same look-ups.
    requests = max(int(state["requests"]) for state in states)
    return {"requests": requests, **{name: torch.from_numpy(array[newest]) for name, array in arrays}}
