"""One rank's copies of another's rows, and the residuals: the gradients of these rows that it has not sent yet."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dct.embedding.cache import Admission, RowCache
from lightning_dct.embedding.ids import HALVE_EVERY, REGROUP_EVERY, RequestCode
from lightning_dct.embedding.owners import Int64Array


class RememberedRows:
    """Copies, and optionally residuals, of the rows in a cache.

    The rank that uses rows and the rank that owns them each have an object of this class for the other. Their copies
    are bitwise identical, because both start a row from its initial value and add the same messages.

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
        fresh = admission.slots[admission.new]
        if fresh.size:
            at = torch.from_numpy(fresh).to(self.copies.device)
            self.copies.index_copy_(0, at, self._initial(wanted[admission.new]).to(self.copies))
            self.residual.index_fill_(0, at, 0)
        requests = self.cache.requests
        if requests % REGROUP_EVERY == 0 or requests & (requests - 1) == 0:
            places, slots = self.cache.contents()
            self.code.learn(places, self.cache.counts[slots])
        if requests % HALVE_EVERY == 0:
            self.cache.counts >>= 1  # so that old requests lose weight
        return admission, evicted

    def move(self, device: torch.device) -> None:
        """Move copies and residuals."""
        self.copies, self.residual = self.copies.to(device), self.residual.to(device)

    def state_dict(self) -> dict[str, Any]:
        """The state as numbers and CPU tensors."""
        used = self.cache.num_slots
        return {
            "cache": self.cache.state_dict(),
            "code": self.code.state_dict(),
            "thresholds": torch.from_numpy(self.thresholds.copy()),
            "copies": self.copies[:used].to("cpu", copy=True),
            "residual": self.residual[:used].to("cpu", copy=True),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self.cache.load_state_dict(state["cache"])
        self.code.load_state_dict(state["code"])
        self.thresholds = state["thresholds"].numpy().copy()
        self.copies = state["copies"].to(self.copies, copy=True)
        self.residual = state["residual"].to(self.residual, copy=True)


def add_entries(rows: Tensor, slots: Tensor, positions: Tensor, values: Tensor) -> None:
    """Add values to ``rows[slots]``, in place, at distinct positions in these rows, flattened."""
    dim = rows.shape[1]
    flat, entries = rows.view(-1), slots.index_select(0, positions // dim) * dim + positions % dim
    flat.index_copy_(0, entries, flat.index_select(0, entries).add_(values.to(rows.dtype)))
