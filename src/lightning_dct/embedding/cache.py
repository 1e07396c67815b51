"""A bounded index of rows: which have a slot, which is the least recently requested one.

No communication.

A rank has one such index for the rows of all other ranks that it remembers, and one for its own
rows that others remember. A row is named by a peer and its place there. The time of a request is
proportional to its rows, not to those of the index.
"""

from collections import deque
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from lightning_dct.embedding.owners import GOLDEN, Int64Array
from lightning_dct.kernels import compiled


class Admission(NamedTuple):
    """The result of a request."""

    slots: Int64Array  # shape `[k]`: of the requested rows
    new: np.typing.NDArray[np.bool_]  # shape `[k]`: whether the row was missing before
    evicted: Int64Array  # shape `[e]`: the evicted rows
    evicted_slots: Int64Array  # shape `[e]`: their former slots, which new rows may have now
    evicted_peers: Int64Array  # shape `[e]`: their peers


_SMALLEST_BITS = 6
# The arrays of a cache's state, by slot, and their dtypes in memory; in a state they are int64.
CACHE_ARRAYS = {"row_at": np.int64, "last_used": np.int64, "counts": np.int32}
# With peers there is one more.
PEER_ARRAY = {"peer_at": np.int32}
# The capacity of a cache that evicts nothing.
UNBOUNDED = 2**62
_NO_PEERS = np.empty(0, dtype=np.int64)
# Odd, to spread the rows of different peers.
_PEER_FACTOR = np.uint64(0xD6E8FEB86659FD93)
# Bytes of a slot, at most: the arrays, the hash table and the queue.
INDEX_BYTES = 24 + 24 + 32


class RowCache:
    """At most ``capacity`` rows, or those of one larger request.

    If it is unbounded, rows stay until :meth:`release`.

    A hash table finds the slots of whole arrays of rows at a time. It contains only slots, and the
    search compares the row at a slot with the sought one. So an eviction deletes nothing: a stale
    entry leads to a slot with another row, and the search continues. A table that is half full is
    rebuilt without stale entries, so the cost of an insertion does not depend on the number of
    rows.

    With ``with_peers`` a row is named by a peer and a number, and methods that take rows take their
    peers, too.

    Attributes:
        row_at: By slot: its row, -1 where it is free.
        peer_at: By slot: the peer of its row; empty without peers.
        last_used: By slot: the time of its last request.
        counts: By slot: the number of requests of its row since admission.
        requests: The number of requests so far.
    """

    def __init__(self, capacity: int, with_peers: bool = False) -> None:
        self.capacity = capacity
        self._dtypes: dict[str, Any] = {**CACHE_ARRAYS, **(PEER_ARRAY if with_peers else {})}
        self.row_at = self.last_used = np.empty(0, dtype=np.int64)
        self.counts = self.peer_at = np.empty(0, dtype=np.int32)
        self.requests = 0
        self._memory: dict[str, npt.NDArray[Any]] = {}  # that of the arrays, to grow in
        self._derive()

    def _derive(self) -> None:
        """Derive the hash table, the free slots, and the queue for eviction from the slots."""
        self._fill_table()
        self._free = np.flatnonzero(self.row_at < 0)
        self._fill_queue()

    def _fill_queue(self) -> None:
        # Slots and the times of their requests, oldest first. An entry is stale, and is skipped, if
        # its slot was requested again or has another row now. Slots of one request are sorted, the
        # lowest first, when the first of them is to go: most requests never come to that.
        used = (
            np.flatnonzero(self.row_at >= 0)
            if self.capacity < UNBOUNDED
            else np.empty(0, dtype=np.int64)
        )
        order = used[np.argsort(self.last_used[used], kind="stable")]
        self._queue = deque([(order, self.last_used[order], True)])
        self._queued = order.size

    def _drop_stale(self) -> None:
        """Drop stale entries of the queue."""
        queue: deque[tuple[Int64Array, Int64Array, bool]] = deque()
        for slots, times, is_sorted in self._queue:
            current = np.flatnonzero(self.last_used[slots] == times)
            if current.size:
                queue.append((slots[current], times[current], is_sorted))
        self._queue = queue
        self._queued = sum(slots.size for slots, _, _ in queue)

    def __len__(self) -> int:
        return self.num_slots - self._free.size

    @property
    def num_slots(self) -> int:
        """Slots that were ever used."""
        return self.row_at.size

    def contents(self, peer: int | None = None) -> tuple[Int64Array, Int64Array]:
        """The rows, ascending, and their slots; if the cache has rows of several peers, those of
        one.
        """
        is_used = self.row_at >= 0
        used = np.flatnonzero(is_used if peer is None else is_used & (self.peer_at == peer))
        slots = used[np.argsort(self.row_at[used])]
        return self.row_at[slots], slots

    def find(self, rows: Int64Array, peers: Int64Array | None = None) -> Int64Array:
        """The slots of rows, ``[k]``, -1 for missing rows."""
        slots = np.full(rows.size, -1, dtype=np.int64)
        if not self.num_slots:
            return slots
        if (loops := compiled("cpu", loops="numba_ids")) is not None:
            return cast(
                Int64Array,
                loops.find(
                    self._table,
                    self._bits,
                    self.row_at,
                    self.peer_at,
                    np.ascontiguousarray(rows),  # numba compiles anew for other orders
                    _NO_PEERS if peers is None else peers,
                ),
            )
        places = self._homes(rows, peers)
        sought = np.arange(rows.size)
        while sought.size:
            found = self._table[places]
            slots[sought] = found  # -1 at a free entry: the row is missing
            is_other = self.row_at[found] != rows[sought]
            if peers is not None:
                is_other |= self.peer_at[found] != peers[sought]
            # Slots with other rows are overwritten in the next round.
            on = np.flatnonzero((found >= 0) & is_other)
            places = (places[on] + 1) & (self._table.size - 1)
            sought = sought[on]
        return slots

    def release(self, rows: Int64Array, peers: Int64Array | None = None) -> Int64Array:
        """Free the slots of distinct rows, ``[k]``, and return them; a KeyError if a row has none."""
        slots = self.find(rows, peers)
        if (slots < 0).any():
            raise KeyError(f"{int((slots < 0).sum())} rows are not in the cache")
        self.row_at[slots] = -1
        self._free = np.concatenate([self._free, slots])
        return slots

    def admit(
        self, wanted: Int64Array, slots: Int64Array | None = None, peers: Int64Array | None = None
    ) -> Admission:
        """Admit rows, ``[k]``, distinct.

        ``slots`` are those that :meth:`find` has given, if it has.
        """
        self.requests += 1
        slots = self.find(wanted, peers) if slots is None else slots
        loops = compiled("cpu", loops="numba_ids")
        if loops is not None:
            missing = loops.note(self.last_used, self.counts, slots, self.requests)
        else:
            found = slots[slots >= 0]
            self.last_used[found] = self.requests
            self.counts[found] += 1
            missing = slots.size - found.size
        new = slots < 0
        misses = wanted[new]
        evicted_slots = self._oldest(len(self) + missing - max(self.capacity, wanted.size))
        evicted = self.row_at[evicted_slots]
        evicted_peers = (self.peer_at[evicted_slots] if peers is not None else 0 * evicted).astype(
            np.int64
        )
        self.row_at[evicted_slots] = -1
        free = np.sort(np.concatenate([self._free, evicted_slots]))
        grown = max(missing - free.size, 0)
        taken = np.concatenate([free[:missing], np.arange(self.num_slots, self.num_slots + grown)])
        self._free = free[missing:]
        slots[new] = taken
        self._grow(self.num_slots + grown)
        self.row_at[taken] = misses
        if peers is not None:
            self.peer_at[taken] = peers[new]
        self.last_used[taken] = self.requests
        self.counts[taken] = 1
        if 8 * (self._entries + missing) > 5 * self._table.size:
            self._fill_table()
        else:
            self._put(taken)
        if self.capacity < UNBOUNDED:
            times = np.broadcast_to(np.int64(self.requests), slots.shape)
            self._queue.append((slots, times, False))
            self._queued += slots.size
            if self._queued > 2 * self.num_slots + 1:  # half of it is stale
                self._drop_stale()
        return Admission(slots, new, evicted, evicted_slots, evicted_peers)

    def state_dict(self) -> dict[str, Any]:
        """The state as integers and tensors."""
        arrays = {
            name: torch.from_numpy(getattr(self, name).astype(np.int64)) for name in self._dtypes
        }
        return {"requests": self.requests, **arrays}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self.requests = int(state["requests"])
        for name, dtype in self._dtypes.items():
            setattr(self, name, state[name].numpy().astype(dtype))
        self._derive()

    def _grow(self, number: int) -> None:
        """Give the arrays so many slots; the new ones are to be filled."""
        if number == self.num_slots:
            return
        for name, dtype in self._dtypes.items():
            array = getattr(self, name)
            memory = self._memory.get(name)
            # An array that was loaded or copied has memory of its own.
            if memory is None or array.base is not memory or number > memory.size:
                self._memory[name] = memory = np.empty(number + number // 4, dtype=dtype)
                memory[: array.size] = array
            setattr(self, name, memory[:number])

    def _oldest(self, number: int) -> Int64Array:
        """The least recently requested slots, ascending, never those of the present request."""
        oldest = [np.empty(0, dtype=np.int64)]
        while number > 0:
            slots, times, is_sorted = self._queue.popleft()
            if not is_sorted:
                slots = np.sort(slots)
            # Most entries at the head are current, so twice the number is usually enough.
            piece = min(2 * number, slots.size)
            due = np.flatnonzero(self.last_used[slots[:piece]] == times[:piece])[:number]
            seen = int(due[-1]) + 1 if due.size == number else piece
            if seen < slots.size:
                self._queue.appendleft((slots[seen:], times[seen:], True))
            self._queued -= seen
            oldest.append(slots[due])
            number -= due.size
        return np.sort(np.concatenate(oldest))

    def _fill_table(self) -> None:
        slots = np.flatnonzero(self.row_at >= 0)
        self._bits = max(_SMALLEST_BITS, (3 * slots.size).bit_length())
        self._table = np.full(1 << self._bits, -1, dtype=np.int32)
        self._entries = 0
        self._put(slots)

    def _put(self, slots: Int64Array) -> None:
        """Insert slots, ``[k]``, with new rows into the hash table."""
        self._entries += slots.size
        if (loops := compiled("cpu", loops="numba_ids")) is not None:
            loops.put(self._table, self._bits, self.row_at, self.peer_at, slots)
            return
        places = self._homes(self.row_at[slots], self.peer_at[slots] if self.peer_at.size else None)
        while slots.size:
            free = self._table[places] < 0
            self._table[places[free]] = slots[free]
            # If several rows have the same place, one of them gets it.
            on = np.flatnonzero(self._table[places] != slots)
            places = (places[on] + 1) & (self._table.size - 1)
            slots = slots[on]

    def _homes(self, rows: Int64Array, peers: npt.NDArray[Any] | None) -> Int64Array:
        """Multiplicative hashing (Knuth, The Art of Computer Programming, vol. 3, 6.4)."""
        numbers = rows.astype(np.uint64)
        if peers is not None:
            numbers ^= peers.astype(np.uint64) * _PEER_FACTOR
        return ((numbers * GOLDEN) >> np.uint64(64 - self._bits)).astype(np.int64)
