"""One store of rows for all peers: copies of rows, and the gradients of these rows that were not
sent yet.

A rank has two stores. In ``own_copies`` are its copies of the rows of all owners, with residuals.
In ``peer_copies`` are the copies that all users have of its own rows. The copies of both ends are
bitwise identical, because both start a row from its initial value and add the same messages.

``own_copies`` has room for a number of rows, whatever the number of owners. It evicts the least
recently requested rows and says which: with each request goes a list of evicted rows, which the
owner's ``peer_copies`` forgets.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_dct.compress.awaited import to_device
from lightning_dct.embedding.cache import INDEX_BYTES, RowCache
from lightning_dct.embedding.messages import CODE_BYTES, HALVE_EVERY, REGROUP_EVERY, RequestCode
from lightning_dct.embedding.owners import Int64Array
from lightning_dct.wire.positions import PayloadError

# Parts with an entry for each slot, where the rows are.
ROW_STATE = ("copies", "residual")
# Own copies, residuals, peers' copies and the index of both take less than so many times the bytes
# of a rank's own rows, or so many bytes if that is more: a small table is remembered whole.
SHARES = 2
LEAST_BYTES = 64 << 20


class Evicted(NamedTuple):
    """Rows of one peer that have left a store."""

    places: Int64Array  # shape `[e]`, ascending
    residual: Tensor  # shape `[e, dim]`; `[e, 0]` of a store without residuals


def bytes_a_row(dim: int, entry_bytes: int = 4) -> int:
    """Bytes that a remembered row takes at most, on the rank that uses it and on its owner
    together.
    """
    return 3 * dim * entry_bytes + 2 * (1 + INDEX_BYTES + CODE_BYTES)


def default_room(own_rows: int, dim: int, row_bytes: int, entry_bytes: int = 4) -> int:
    """The rows to remember, if no setting says: :data:`SHARES` times the bytes of a rank's own rows
    pay for them, or :data:`LEAST_BYTES`.
    """
    return max(LEAST_BYTES, SHARES * own_rows * row_bytes) // bytes_a_row(dim, entry_bytes)


class RowStore:
    """Copies, and optionally residuals, of rows of several peers, by peer and place.

    The next message brings all of a row whose copy is outdated, because it is new or because the
    owner has replaced the row. Each peer and table has a threshold. The index is always on the CPU.

    Args:
        capacity: Most rows, or those of one larger request; ``UNBOUNDED`` if rows stay until
            :meth:`release`.
        universes: By peer, the number of rows that places are of.
        num_peers: The number of ranks.
        num_tables: The number of tables.
        initial: Gives the initial values of rows of a peer by their places, shape ``[n, dim]``, on
            the CPU.
        empty: Shape ``[0, dim]``, with the copies' dtype and device.
        with_residual: Whether to keep residuals.
    """

    def __init__(
        self,
        capacity: int,
        universes: Mapping[int, int],
        num_peers: int,
        num_tables: int,
        initial: Callable[[int, Int64Array], Tensor],
        empty: Tensor,
        with_residual: bool,
    ) -> None:
        self.cache = RowCache(capacity, with_peers=True)
        self.codes = {peer: RequestCode(universe) for peer, universe in universes.items()}
        self.thresholds = np.zeros((num_peers, num_tables), dtype=np.float64)
        self._initial = initial
        self.copies = empty
        self.residual = empty if with_residual else empty[:, :0]
        # Of each slot, whether its copy is outdated; on the CPU.
        self.outdated: npt.NDArray[np.bool_] = np.empty(0, dtype=np.bool_)

    def find(self, peer: int, places: Int64Array) -> Int64Array:
        """The slots of rows of a peer, ``[k]``, -1 for missing rows."""
        return self.cache.find(places, np.full(places.size, peer))

    def admit(
        self, wanted: Mapping[int, Int64Array]
    ) -> tuple[dict[int, Int64Array], dict[int, Evicted]]:
        """Admit rows, by peer their places: ascending and distinct.

        Returns:
            By peer, the slots of these rows, and the rows that had to go.
        """
        peers = np.repeat(
            np.array([*wanted], dtype=np.int64), [part.size for part in wanted.values()]
        )
        places = np.concatenate([np.empty(0, dtype=np.int64), *wanted.values()])
        admission = self.cache.admit(places, peers=peers)
        evicted = {peer: Evicted(places[:0], self.residual[:0]) for peer in wanted}
        if admission.evicted.size:
            order = np.lexsort((admission.evicted, admission.evicted_peers))
            gone = admission.evicted[order]
            gone_peers = admission.evicted_peers[order]
            residuals = self.residual.index_select(
                0, self._on_device(admission.evicted_slots[order])
            )
            cuts = np.searchsorted(gone_peers, [[peer, peer + 1] for peer in wanted])
            evicted = {
                peer: Evicted(gone[low:high], residuals[low:high])
                for peer, (low, high) in zip(wanted, cuts.tolist(), strict=True)
            }
        self._make_room()
        self._begin(peers[admission.new], places[admission.new], admission.slots[admission.new])
        ends = np.cumsum([part.size for part in wanted.values()])[:-1]
        slots = dict(zip(wanted, np.split(admission.slots, ends), strict=True)) if wanted else {}
        return slots, evicted

    def release(self, peer: int, places: Int64Array) -> None:
        """Forget rows of a peer that has evicted them.

        Raises:
            PayloadError: Some of them are not here.
        """
        try:
            self.cache.release(places, np.full(places.size, peer))
        except KeyError as error:
            raise PayloadError(
                f"Rank {peer} has evicted rows that it had not: {error.args[0]}. The two ends'"
                " copies differ. Use the same checkpoint on every rank."
            ) from error

    def _make_room(self) -> None:
        number = self.cache.num_slots
        if number <= len(self.copies):
            return
        for name in ROW_STATE:
            setattr(self, name, _grown(getattr(self, name), number, self.cache.capacity))
        more = np.zeros(len(self.copies) - self.outdated.size, dtype=np.bool_)
        self.outdated = np.concatenate([self.outdated, more])

    def _begin(self, peers: Int64Array, places: Int64Array, slots: Int64Array) -> None:
        """Give new rows their initial values."""
        if not slots.size:
            return
        # Those of a peer follow one another.
        parts = np.split(places, np.flatnonzero(np.diff(peers)) + 1)
        firsts = peers[np.cumsum([0, *(part.size for part in parts[:-1])])].tolist()
        made = [self._initial(peer, part) for peer, part in zip(firsts, parts, strict=True)]
        rows = torch.cat(made).to(self.copies.dtype)
        at = self._on_device(slots)
        self.copies.index_copy_(0, at, to_device(rows, self.copies.device))
        self.residual.index_fill_(0, at, 0)
        self.outdated[slots] = True

    def learn(self) -> None:
        """Group rows anew by how often they are requested, at the same requests on both ends: after
        each request.
        """
        requests = self.cache.requests
        if requests % REGROUP_EVERY == 0 or requests & (requests - 1) == 0:
            for peer, code in self.codes.items():
                places, slots = self.cache.contents(peer)
                code.learn(places, self.cache.counts[slots].astype(np.int64))
        if requests % HALVE_EVERY == 0:
            self.cache.counts >>= 1  # so that old requests lose weight

    def _on_device(self, slots: Int64Array) -> Tensor:
        return to_device(torch.from_numpy(slots), self.copies.device)

    def replaced(self, places: Int64Array | None = None) -> None:
        """Note that the owner has replaced the rows at these places, or all rows: their copies of
        all peers.
        """
        if places is None:
            self.outdated[:] = True
            return
        for peer in self.codes:
            slots = self.find(peer, places)
            self.outdated[slots[slots >= 0]] = True

    def take_outdated(self, slots: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether the copies in slots, ``[k]``, are outdated; they count as current after this
        call.
        """
        outdated = self.outdated[slots]
        self.outdated[slots] = False
        return outdated

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move copies and residuals, and change their dtype."""
        self.copies = self.copies.to(device, dtype)
        self.residual = self.residual.to(device, dtype)

    def state_dict(self) -> dict[str, Any]:
        """The state as numbers and CPU tensors."""
        used = self.cache.num_slots
        return {
            "cache": self.cache.state_dict(),
            "codes": {peer: code.state_dict() for peer, code in self.codes.items()},
            "thresholds": torch.from_numpy(self.thresholds.copy()),
            **{name: getattr(self, name)[:used].to("cpu", copy=True) for name in ROW_STATE},
            "outdated": torch.from_numpy(self.outdated[:used].copy()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self.cache.load_state_dict(state["cache"])
        for peer, code in self.codes.items():
            code.load_state_dict(state["codes"][peer])
        self.thresholds = state["thresholds"].numpy().copy()
        for name in ROW_STATE:
            setattr(self, name, state[name].to(getattr(self, name), copy=True))
        self.outdated = state["outdated"].numpy().copy()


def _grown(rows: Tensor, number: int, most: int) -> Tensor:
    """Rows, ``[k, dim]``, and zeros, as if there were so many; there will be ``most`` at most."""
    if not rows.is_cpu:
        # A quarter more makes reallocations rare.
        more = max(number, min(len(rows) + len(rows) // 4, most)) - len(rows)
        return torch.cat([rows, rows.new_zeros(more, *rows.shape[1:])])
    if rows.untyped_storage().nbytes() < number * rows[:1].nbytes or not len(rows):
        # The system provides pages of zeros when they are written. So memory for twice the rows
        # takes no more of the machine's than the rows that there are.
        memory = np.zeros(
            (max(number, min(2 * len(rows), most)), *rows.shape[1:]), rows.numpy().dtype
        )
        memory[: len(rows)] = rows.numpy()
        rows = torch.from_numpy(memory)
    return rows.as_strided((number, *rows.shape[1:]), (rows.shape[1], 1))


def add_entries(rows: Tensor, farther: Tensor, positions: Tensor, values: Tensor) -> None:
    """Add values to some of the rows, in place, at distinct positions in these, flattened.

    ``farther`` says by how many entries those of each row, ``[k]``, are farther on in all rows.
    """
    entries = positions + farther.index_select(0, positions // rows.shape[1])
    rows.view(-1).index_add_(0, entries, values.to(rows.dtype))
