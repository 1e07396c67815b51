"""A bounded cache of rows, whose contents follow from the requests alone.

The rank that requests rows and the rank that owns them each have a cache for the other. Both see the same requests in
the same order, so they admit and evict the same rows without communication. The least recently requested row is evicted
first. The time of a request is proportional to its rows, not to the cache's.

For the rows in a cache, a rank remembers copies of another's rows, and as residuals the gradients of these rows that it
has not sent yet.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_dct.checksums import CheckpointError
from lightning_dct.embedding.messages import HALVE_EVERY, REGROUP_EVERY, RequestCode
from lightning_dct.embedding.owners import GOLDEN, Int64Array, RowOwners


class Admission(NamedTuple):
    """The result of a request."""

    slots: Int64Array  # shape `[k]`: of the requested rows
    new: np.typing.NDArray[np.bool_]  # shape `[k]`: whether the row was missing before
    evicted: Int64Array  # shape `[e]`: the evicted rows
    evicted_slots: Int64Array  # shape `[e]`: their former slots, which new rows may have now


_SMALLEST_BITS = 6
# The arrays of a cache's state, by slot.
CACHE_ARRAYS = ("row_at", "last_used", "counts")
# Groups of rows are exponents of counts, which are int64.
MOST_GROUPS = 63
# Parts with an entry for each slot of the cache.
ROW_STATE = ("copies", "residual", "outdated")


class RowCache:
    """At most ``capacity`` rows, or those of one larger request.

    A hash table finds the slots of whole arrays of rows at a time. It contains only slots, and the search compares the
    row at a slot with the sought one. So an eviction deletes nothing: a stale entry leads to a slot with another row,
    and the search continues. A table that is half full is rebuilt without stale entries, so the cost of an insertion
    does not depend on the number of rows.

    Attributes:
        row_at: By slot: its row, -1 where it is free.
        last_used: By slot: the time of its last request.
        counts: By slot: the number of requests of its row since admission.
        requests: The number of requests so far.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.row_at, self.last_used, self.counts = (np.empty(0, dtype=np.int64) for _ in CACHE_ARRAYS)
        self.requests = 0
        self._derive()

    def _derive(self) -> None:
        """Derive the hash table, the free slots, and the queue for eviction from the slots."""
        self._fill_table()
        self._free = np.flatnonzero(self.row_at < 0)
        # Slots and the times of their requests, oldest first, then lowest first. An entry is stale, and is skipped, if
        # its slot was requested again or has another row now.
        used = np.flatnonzero(self.row_at >= 0)
        order = used[np.argsort(self.last_used[used], kind="stable")]
        self._queue = deque([(order, self.last_used[order])])
        self._queued = order.size

    def __len__(self) -> int:
        return self.num_slots - self._free.size

    @property
    def num_slots(self) -> int:
        """Slots that were ever used."""
        return self.row_at.size

    def contents(self) -> tuple[Int64Array, Int64Array]:
        """The rows, ascending, and their slots."""
        used = np.flatnonzero(self.row_at >= 0)
        slots = used[np.argsort(self.row_at[used])]
        return self.row_at[slots], slots

    def find(self, rows: Int64Array) -> Int64Array:
        """The slots of rows, ``[k]``, -1 for missing rows."""
        slots = np.full(rows.size, -1, dtype=np.int64)
        if not self.num_slots:
            return slots
        places, sought = self._homes(rows), np.arange(rows.size)
        while sought.size:
            found = self._table[places]
            slots[sought] = found  # -1 at a free entry: the row is missing
            # Slots with other rows are overwritten in the next round.
            on = np.flatnonzero((found >= 0) & (self.row_at[found] != rows[sought]))
            places, sought = (places[on] + 1) & (self._table.size - 1), sought[on]
        return slots

    def admit(self, wanted: Int64Array, slots: Int64Array | None = None) -> Admission:
        """Admit rows, ``[k]``, ascending and distinct. ``slots`` are those that :meth:`find` has given, if it has."""
        self.requests += 1
        slots = self.find(wanted) if slots is None else slots
        new = slots < 0
        self.last_used[slots[~new]] = self.requests
        misses = wanted[new]
        evicted_slots = self._oldest(len(self) + misses.size - max(self.capacity, wanted.size))
        evicted = self.row_at[evicted_slots]
        self.row_at[evicted_slots] = -1
        free = np.sort(np.concatenate([self._free, evicted_slots]))
        grown = max(misses.size - free.size, 0)
        taken = np.concatenate([free[: misses.size], np.arange(self.num_slots, self.num_slots + grown)])
        self._free = free[misses.size :]
        slots[new] = taken
        if grown:  # the new slots are all taken
            for name in CACHE_ARRAYS:
                setattr(self, name, np.concatenate([getattr(self, name), np.full(grown, -1)]))
        self.row_at[taken] = misses
        self.last_used[taken] = self.requests
        self.counts[taken] = 0
        self.counts[slots] += 1
        if 2 * (self._entries + misses.size) > self._table.size:
            self._fill_table()
        else:
            self._put(misses, taken)
        self._queue.append((np.sort(slots), np.full(slots.size, self.requests)))
        self._queued += slots.size
        if self._queued > 4 * self.num_slots + 1:  # most of it is stale
            self._derive()
        return Admission(slots, new, evicted, evicted_slots)

    def state_dict(self) -> dict[str, Any]:
        """The state as integers and tensors."""
        return {"requests": self.requests, **{name: torch.tensor(getattr(self, name)) for name in CACHE_ARRAYS}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self.requests = int(state["requests"])
        self.row_at, self.last_used, self.counts = (state[name].numpy().copy() for name in CACHE_ARRAYS)
        self._derive()

    def _oldest(self, number: int) -> Int64Array:
        """The least recently requested slots, ascending, never those of the present request."""
        oldest = [np.empty(0, dtype=np.int64)]
        while number > 0:
            slots, times = self._queue.popleft()
            # Most entries at the head are current, so twice the number is usually enough.
            piece = min(2 * number, slots.size)
            due = np.flatnonzero(self.last_used[slots[:piece]] == times[:piece])[:number]
            seen = int(due[-1]) + 1 if due.size == number else piece
            if seen < slots.size:
                self._queue.appendleft((slots[seen:], times[seen:]))
            self._queued -= seen
            oldest.append(slots[due])
            number -= due.size
        return np.sort(np.concatenate(oldest))

    def _fill_table(self) -> None:
        slots = np.flatnonzero(self.row_at >= 0)
        self._bits = max(_SMALLEST_BITS, (4 * slots.size).bit_length())
        self._table = np.full(1 << self._bits, -1, dtype=np.int64)
        self._entries = 0
        self._put(self.row_at[slots], slots)

    def _put(self, rows: Int64Array, slots: Int64Array) -> None:
        """Insert the slots of new rows, ``[k]``, into the hash table."""
        self._entries += rows.size
        places = self._homes(rows)
        while slots.size:
            free = self._table[places] < 0
            self._table[places[free]] = slots[free]
            # If several rows have the same place, one of them gets it.
            on = np.flatnonzero(self._table[places] != slots)
            places, slots = (places[on] + 1) & (self._table.size - 1), slots[on]

    def _homes(self, rows: Int64Array) -> Int64Array:
        """Multiplicative hashing (Knuth, The Art of Computer Programming, vol. 3, 6.4)."""
        return ((rows.astype(np.uint64) * GOLDEN) >> np.uint64(64 - self._bits)).astype(np.int64)


class RememberedRows:
    """Copies, and optionally residuals, of the rows in a cache.

    The rank that uses rows and the rank that owns them each have an object of this class for the other. Their copies
    are bitwise identical, because both start a row from its initial value and add the same messages. The next message
    brings all of a row whose copy is outdated, because it is new or because the owner has replaced the row.

    There are at most ``capacity`` rows of the ``universe`` of the owner's rows. ``initial`` gives the initial values of
    rows by their places, shape ``[n, dim]``. ``empty``, shape ``[0, dim]``, has the copies' dtype and device. Each
    table has a threshold. The cache is always on the CPU.
    """

    def __init__(
        self,
        capacity: int,
        universe: int,
        num_tables: int,
        initial: Callable[[Int64Array], Tensor],
        empty: Tensor,
        with_residual: bool,
    ) -> None:
        self.cache = RowCache(capacity)
        self.code = RequestCode(universe)
        self.thresholds = np.zeros(num_tables, dtype=np.float64)
        self._initial = initial
        self.copies, self.residual = empty, empty if with_residual else empty[:, :0]
        self.outdated = empty.new_empty(0, dtype=torch.bool)  # of each copy, where the rows are

    def admit(self, wanted: Int64Array) -> tuple[Admission, Tensor]:
        """Admit rows by their places on the owner, ``[k]``, ascending and distinct.

        Returns:
            The admission, and the residuals of the evicted rows, shape ``[e, dim]`` (``[e, 0]`` without residuals).
        """
        admission = self.cache.admit(wanted)
        evicted = self.residual.index_select(0, torch.from_numpy(admission.evicted_slots).to(self.residual.device))
        missing = self.cache.num_slots - len(self.copies)
        if missing > 0:
            # Doubling, up to the capacity of the cache, makes reallocations rare.
            more = max(missing, min(len(self.copies), self.cache.capacity - len(self.copies)))
            for name in ROW_STATE:
                before = getattr(self, name)
                setattr(self, name, torch.cat([before, before.new_zeros(more, *before.shape[1:])]))
        fresh = admission.slots[admission.new]
        if fresh.size:
            at = torch.from_numpy(fresh).to(self.copies.device)
            self.copies.index_copy_(0, at, self._initial(wanted[admission.new]).to(self.copies))
            self.residual.index_fill_(0, at, 0)
            self.outdated.index_fill_(0, at, True)
        requests = self.cache.requests
        if requests % REGROUP_EVERY == 0 or requests & (requests - 1) == 0:
            places, slots = self.cache.contents()
            self.code.learn(places, self.cache.counts[slots])
        if requests % HALVE_EVERY == 0:
            self.cache.counts >>= 1  # so that old requests lose weight
        return admission, evicted

    def replaced(self, places: Int64Array | None = None) -> None:
        """Note that the owner has replaced the rows at these places, or all rows."""
        slots = np.arange(self.cache.num_slots) if places is None else self.cache.find(places)
        self.outdated[torch.from_numpy(slots[slots >= 0]).to(self.outdated.device)] = True

    def take_outdated(self, slots: Tensor) -> Tensor:
        """Whether the copies in slots, ``[k]``, are outdated; the message that is made now ends that."""
        outdated = self.outdated.index_select(0, slots)
        self.outdated.index_fill_(0, slots, False)
        return outdated

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move copies and residuals, and change their dtype."""
        self.copies, self.residual = self.copies.to(device, dtype), self.residual.to(device, dtype)
        self.outdated = self.outdated.to(device)

    def state_dict(self) -> dict[str, Any]:
        """The state as numbers and CPU tensors."""
        used = self.cache.num_slots
        return {
            "cache": self.cache.state_dict(),
            "code": self.code.state_dict(),
            "thresholds": torch.from_numpy(self.thresholds.copy()),
            **{name: getattr(self, name)[:used].to("cpu", copy=True) for name in ROW_STATE},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self.cache.load_state_dict(state["cache"])
        self.code.load_state_dict(state["code"])
        self.thresholds = state["thresholds"].numpy().copy()
        for name in ROW_STATE:
            setattr(self, name, state[name].to(getattr(self, name), copy=True))


def add_entries(rows: Tensor, slots: Tensor, positions: Tensor, values: Tensor) -> None:
    """Add values to ``rows[slots]``, in place, at distinct positions in these rows, flattened."""
    dim = rows.shape[1]
    flat, entries = rows.view(-1), slots.index_select(0, positions // dim) * dim + positions % dim
    flat.index_copy_(0, entries, flat.index_select(0, entries).add_(values.to(rows.dtype)))


def check_memory(
    state: Mapping[str, Any], table_rows: Sequence[int], dim: int, kind: type[RowOwners] = RowOwners
) -> RowOwners:
    """Check sizes, ranges and dtypes in the state of one rank (``compression_state`` of tables); the saved placement.

    Raises:
        CheckpointError: The tables have other sizes than ``table_rows`` and ``dim``, or the state is corrupt.
    """
    try:
        saved = kind(**state["placement"])
        if list(saved.table_rows) != list(table_rows):
            raise ValueError(f"it has tables of {list(saved.table_rows)} rows, and the model of {list(table_rows)}")
        for part, is_sound in _soundness(state, saved, dim):
            if not is_sound:
                raise ValueError(part)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            "The checkpoint's memory of sharded tables does not fit or is corrupt"
            f" ({type(error).__name__}: {error}). Resume with the model that was saved, or from another checkpoint."
        ) from error
    return saved


def _soundness(state: Mapping[str, Any], saved: RowOwners, dim: int) -> Iterator[tuple[str, bool]]:
    """Each part of a rank's state, and whether it is sound, if those before it are."""
    num_tables, ranks = len(saved.table_rows), range(saved.world_size)
    lengths = len(saved.block_rows), len(saved.first_rank)
    is_placement = lengths == (num_tables, num_tables) and min(saved.block_rows) >= 1
    # A number of ranks that is damaged would otherwise be counted up to.
    yield "the number of ranks", saved.world_size == len(state["held"]) + 1
    yield "the placement of its rows", is_placement and all(first in ranks for first in saved.first_rank)
    largest = max(saved.owned_rows)
    for end in ("held", "mirrors"):
        for peer, rows in state[end].items():
            yield f"rank {peer} of {saved.world_size} in {end!r}", peer in ranks
            # Held rows are the peer's. Mirrored rows are this rank's, and the state does not say which rank it is.
            universe = saved.owned_rows[peer] if end == "held" else largest
            for part, is_sound in _soundness_of_rows(rows, universe, num_tables, dim, end == "held"):
                yield f"{part} of rank {peer} in {end!r}", is_sound
    for places, gradient in state["collected"]:
        yield "the collected gradients", _is_places(places, largest) and gradient.shape == (places.numel(), dim)


def _soundness_of_rows(
    rows: Mapping[str, Any], universe: int, num_tables: int, dim: int, with_residual: bool
) -> Iterator[tuple[str, bool]]:
    """The same for the state of :class:`RememberedRows`."""
    cache, code, thresholds = rows["cache"], rows["code"], rows["thresholds"]
    row_at = cache["row_at"]
    cached, slots = row_at[row_at >= 0], row_at.numel()
    are_arrays = all(cache[name].dtype == torch.int64 and cache[name].shape == (slots,) for name in CACHE_ARRAYS)
    is_set = _is_places(cached, universe) and cached.unique().numel() == cached.numel()
    yield "the cache", are_arrays and is_set and int(cache["requests"]) >= 0
    is_ascending = _is_places(code["rows"], universe) and bool((code["rows"].diff() > 0).all())
    are_groups = _is_places(code["groups"], MOST_GROUPS) and code["groups"].shape == code["rows"].shape
    yield "the groups of rows", is_ascending and are_groups
    are_numbers = thresholds.shape == (num_tables,) and thresholds.dtype.is_floating_point
    yield "the thresholds", are_numbers and bool(((thresholds >= 0) & thresholds.isfinite()).all())
    for name, width in (("copies", dim), ("residual", dim if with_residual else 0)):
        yield f"the {name}", rows[name].shape == (slots, width) and rows[name].is_floating_point()
    yield "the residual", bool(rows["residual"].isfinite().all())
    yield "the outdated rows", rows["outdated"].shape == (slots,) and rows["outdated"].dtype == torch.bool


def _is_places(places: Tensor, universe: int) -> bool:
    """Whether these are whole numbers from 0 to below ``universe``."""
    is_list = places.dtype == torch.int64 and places.ndim == 1
    return is_list and (not places.numel() or (int(places.min()) >= 0 and int(places.max()) < universe))


def unsent_gradients(
    states: Sequence[Mapping[str, Any]], placements: Sequence[RowOwners]
) -> Iterator[tuple[Int64Array, Int64Array, Tensor]]:
    """All that the ranks of these states have collected or not sent yet: tables and rows ``[k]``, and ``[k, dim]``."""
    for rank, (state, placement) in enumerate(zip(states, placements, strict=True)):
        for places, gradient in state["collected"]:
            yield *placement.rows_of(rank, places.numpy()), gradient
        for owner, rows in state["held"].items():
            row_at = rows["cache"]["row_at"]
            yield *placement.rows_of(owner, row_at[row_at >= 0].numpy()), rows["residual"][row_at >= 0]
