"""Embedding bags whose tables grow: ids are any whole numbers, and an id gets a row when it is
looked up often enough.

Messages, caches and residuals are those of :class:`~lightning_dct.ShardedEmbeddingBags`. They name
rows by keys, which an eviction does not change. Only the owner knows which keys have rows, and in
which slots::

    id is looked up too rarely       it has the table's default row; its gradient is dropped
    id is looked up often enough     it has a row of its own, which starts as the default row
    row is evicted                   the id has the default row again, which its users receive whole
"""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dct.compress.awaited import to_device
from lightning_dct.config import check_integer
from lightning_dct.embedding.cache import CACHE_ARRAYS, RowCache
from lightning_dct.embedding.optimizers import group_of
from lightning_dct.embedding.owners import (
    ID_SPACE,
    Int64Array,
    RowOwners,
    initial_rows,
    place_by_hash,
)
from lightning_dct.embedding.pruning import is_row_state
from lightning_dct.embedding.sharded import ShardedEmbeddingBags
from lightning_dct.step_hooks import before_steps_while_alive


class RowDirectory:
    """The keys that have rows, at most ``capacity``, and their slots; and as many keys that are
    being counted.

    A key gets a row when it was requested in ``admit_after`` look-ups. All ranks' requests in one
    look-up count as one, so the count does not depend on the number of ranks. A new row replaces
    the least recently requested one.
    """

    def __init__(self, capacity: int, admit_after: int) -> None:
        self.admit_after = admit_after
        self.rows = RowCache(capacity)
        self.counted = RowCache(capacity)
        self.parts = {"rows": self.rows, "counted": self.counted}

    def request(self, keys: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Count a look-up of keys, ``[k]``, ascending and distinct, and make rows for those that
        are due.

        If these are more than fit, the first keys get rows.

        Returns:
            The keys with a new row, ascending, its slots, and the keys whose rows were evicted.
        """
        slots = self.rows.find(keys)
        wanted = slots >= 0
        due = np.flatnonzero(~wanted)
        if self.admit_after > 1:
            counted = self.counted.admit(keys[due]).slots
            due = due[self.counted.counts[counted] >= self.admit_after]
        wanted[due[: self.rows.capacity - int(wanted.sum())]] = True
        admission = self.rows.admit(keys[wanted], slots[wanted])
        return keys[wanted][admission.new], admission.slots[admission.new], admission.evicted

    def state_dict(self) -> dict[str, Any]:
        """Both caches."""
        return {part: cache.state_dict() for part, cache in self.parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        for part, cache in self.parts.items():
            cache.load_state_dict(state[part])

    def merge(
        self, states: Sequence[Mapping[str, Any]], is_own: Callable[[Int64Array], Any]
    ) -> Int64Array:
        """Merge the states of all owners of another size; return this owner's oldest keys, whose
        rows do not fit.
        """
        evicted = {}
        for part, cache in self.parts.items():
            saved = [state[part] for state in states]
            arrays = {
                name: np.concatenate([state[name].numpy() for state in saved])
                for name in CACHE_ARRAYS
            }
            rows = arrays["row_at"]
            own = np.flatnonzero((rows >= 0) & is_own(rows))
            newest, older = np.split(
                own[np.lexsort((rows[own], -arrays["last_used"][own]))], [cache.capacity]
            )
            evicted[part] = rows[older]
            # All owners count the same look-ups.
            requests = max(int(state["requests"]) for state in saved)
            merged = {name: torch.from_numpy(array[newest]) for name, array in arrays.items()}
            cache.load_state_dict({**merged, "requests": requests})
        return evicted["rows"]


class GrowingEmbeddingBags(ShardedEmbeddingBags):
    """:class:`~lightning_dct.ShardedEmbeddingBags` without a number of rows: any id from 0 to
    ``2**63 - 1`` is valid.

    A hash of table and id says which rank owns a row. The owner makes the row once the id
    has occurred in ``admit_after`` training look-ups. An id without a row gives its table's default
    row, which is random and never trained. A new row starts as the default row. When an owner's
    share of ``max_rows`` is full, the least recently requested row is evicted, with its optimizer
    state. If its id is looked up again, it starts at the default row.

    With ``n`` tables, ids of ``2**63 / n`` (rounded down to a power of two) and more are hashed to
    the bits that those below have. So two large ids share a row with the probability that two
    hashes of that length collide.

    Use a second module for tables of fixed size.

    Args:
        num_tables: Number of tables.
        embedding_dim: Entries a row.
        max_rows: Most rows of all tables and ranks together. Each rank allocates its share at the
            start. It should be several times the number of distinct rows in a batch of all ranks.
        admit_after: Training look-ups in which an id must occur before it gets a row. As many ids
            as ``max_rows`` are counted at a time.
        initial_bound: Default rows are uniform on ``[-bound, bound)``; ``1 / sqrt(max_rows)`` when
            None.
        **settings: The other arguments of :class:`~lightning_dct.ShardedEmbeddingBags`; ``seed`` is
            of default rows.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting is out of range.
    """

    agreed = (*ShardedEmbeddingBags.agreed, "max_rows", "admit_after")

    def __init__(
        self,
        num_tables: int,
        embedding_dim: int,
        *,
        max_rows: int,
        admit_after: int = 1,
        initial_bound: float | None = None,
        **settings: Any,
    ) -> None:
        check_integer("num_tables", num_tables, minimum=1)
        check_integer("max_rows", max_rows, minimum=1)
        check_integer("admit_after", admit_after, minimum=1)
        bound = 1 / math.sqrt(max_rows) if initial_bound is None else initial_bound
        super().__init__([ID_SPACE] * num_tables, embedding_dim, initial_bound=bound, **settings)
        self.num_rows = self.max_rows = max_rows
        self.admit_after = admit_after
        tables = np.arange(num_tables)
        self._default_rows = initial_rows(
            self.seed, tables, np.zeros_like(tables), self.initial_bound, embedding_dim
        )
        self._renewed: list[
            Tensor
        ] = []  # slots whose optimizer state is still that of an evicted row

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"{super().extra_repr()}, admit_after={self.admit_after}"

    def place(self, world_size: int) -> RowOwners:
        """Assign rows to ranks by hash."""
        return place_by_hash(len(self.table_rows), world_size)

    def capacity(self) -> int:
        """This rank's share of ``max_rows``."""
        return -(-self.max_rows // self.exchange_group.world_size)

    def initialize_rows(self) -> None:
        """Start without rows."""
        self.weight.detach().zero_()
        self.directory = RowDirectory(self.capacity(), self.admit_after)
        self._watch_optimizers()

    def _made_alone(self) -> None:
        if len(self.directory.rows):
            raise RuntimeError(
                "A process that has made rows of growing tables by itself cannot become one of"
                " several. Save a checkpoint before, and continue from it:"
                " `trainer.fit(ckpt_path=...)`."
            )

    def _watch_optimizers(self) -> None:
        # The optimizers of the rows: without `reset_states`, a new row would step with an evicted
        # row's state.
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        this = weakref.ref(self)

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            if (module := this()) is not None:
                module.reset_states([optimizer])

        before_steps_while_alive(self, before_step)

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy or a file: a copy has optimizers of its own."""
        return {
            name: value for name, value in super().__getstate__().items() if name != "_optimizers"
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Continue from it."""
        super().__setstate__(state)
        self._watch_optimizers()

    def initial_on_host(self, owner: int, places: Int64Array) -> Tensor:
        """The default rows of keys' tables, ``[n, embedding_dim]``, on the CPU."""
        tables = torch.from_numpy(self.placement.tables_of(owner, places))
        return self._default_rows[tables].to(self.weight.dtype)

    def own_rows(self, places: Int64Array, places_there: Tensor | None = None) -> Tensor:
        """A copy of this rank's rows by their keys, ``[n, embedding_dim]``; default rows for keys
        without a row.
        """
        rows = self.initial(self.exchange_group.rank, places)
        slots = to_device(torch.from_numpy(self.directory.rows.find(places)), self.weight.device)
        return torch.where(
            (slots >= 0).unsqueeze(1), self.weight.detach()[slots.clamp(min=0)], rows
        )

    def rows_in_place(
        self, places: Int64Array, places_there: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Rows by their keys; default rows have no place in ``weight``."""
        rows = self.own_rows(places, places_there).to(dtype)
        return rows, torch.arange(len(rows), device=rows.device)

    @torch.no_grad()
    def note_requests(self, places: list[Int64Array]) -> None:
        """Make the rows that are due, and evict others if the capacity is reached."""
        keys, new_slots, evicted = self.directory.request(np.unique(np.concatenate(places)))
        self.traffic.add(admitted_rows=keys.size, evicted_rows=evicted.size)
        self.rows_replaced(evicted)
        if not keys.size:
            return
        slots = to_device(torch.from_numpy(new_slots), self.weight.device)
        self.weight[slots] = self.initial(self.exchange_group.rank, keys)
        if self.weight.grad is not None:  # of an earlier micro-batch
            self.weight.grad = _without(self.weight.grad, slots)
        self._renewed.append(slots)
        self.reset_states(self._optimizers)

    def resolve(self, places: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The slots of keys, ascending, and their gradients, without keys that have no row."""
        found = torch.from_numpy(self.directory.rows.find(places.cpu().numpy()))
        slots = to_device(found, places.device)
        order = slots.argsort()
        order = order[slots[order] >= 0]
        return slots[order], gradient[order]

    def reset_states(self, optimizers: Iterable[Optimizer]) -> None:
        """Reset the optimizer state of new rows: to zero, or to the ``initial_accumulator_value``
        of ``Adagrad``.
        """
        found = [
            (one, group) for one in optimizers if (group := group_of(self.weight, one)) is not None
        ]
        self._optimizers.update(one for one, _ in found)
        if not (found and self._renewed):
            return
        slots = torch.cat([part.to(self.weight.device) for part in self._renewed])
        self._renewed = []
        for optimizer, group in found:
            state = optimizer.state.get(self.weight, {})
            for name, value in state.items():
                if is_row_state(value, self.weight) and value.is_sparse:
                    state[name] = _without(value, slots)
                elif is_row_state(value, self.weight):
                    value[slots] = (
                        group.get("initial_accumulator_value", 0.0) if name == "sum" else 0.0
                    )

    def get_extra_state(self) -> dict[str, Any]:
        """The clock, and the directory if the ``state_dict`` has the rows."""
        if self.saved_in_shards or not self.is_materialized:
            return super().get_extra_state()
        return {**super().get_extra_state(), "directory": self.directory.state_dict()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore both."""
        super().set_extra_state(state)
        if "directory" in state and not self.saved_in_shards:
            self.directory.load_state_dict(state["directory"])

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        rows = state_dict.get(f"{prefix}weight")
        if rows is None or (self.is_materialized and rows.shape == self.weight.shape):
            super()._load_from_state_dict(state_dict, prefix, *arguments)
            return
        arguments[4].append(
            f"`{prefix}weight` has shape {list(rows.shape)}. Growing tables take this rank's rows,"
            " with the same `max_rows`, after `materialize()`. Else continue from a checkpoint:"
            " `trainer.fit(ckpt_path=...)`."
        )


def _without(rows: Tensor, slots: Tensor) -> Tensor:
    """A sparse tensor without some of its rows."""
    rows = rows.coalesce()
    kept = torch.isin(rows.indices()[0], slots).logical_not_()
    parts = rows.indices()[:, kept], rows.values()[kept]
    return torch.sparse_coo_tensor(*parts, rows.shape, is_coalesced=True, check_invariants=False)
