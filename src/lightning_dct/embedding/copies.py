"""One rank's copies of another's rows, and the residuals: the gradients of these rows that it has not sent yet."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dct.embedding.cache import Admission, RowCache
from lightning_dct.embedding.ids import HALVE_EVERY, REGROUP_EVERY, RequestCode
from lightning_dct.embedding.owners import Int64Array

# What has an entry for each slot of the cache.
ROW_STATE = ("copies", "residual", "outdated")


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
            self.copies = torch.cat([self.copies, self.copies.new_zeros(more, self.copies.shape[1])])
            self.residual = torch.cat([self.residual, self.residual.new_zeros(more, self.residual.shape[1])])
            self.outdated = torch.cat([self.outdated, self.outdated.new_zeros(more)])
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

    def move(self, device: torch.device) -> None:
        """Move copies and residuals."""
        for name in ROW_STATE:
            setattr(self, name, getattr(self, name).to(device))

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
