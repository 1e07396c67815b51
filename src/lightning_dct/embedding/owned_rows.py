"""This rank's rows of sharded tables: makes, loads and reads them, and gives them to
``state_dict``.
"""

import warnings
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dct.activations.module import CompressedModule
from lightning_dct.compress.awaited import to_device
from lightning_dct.embedding.bags import Features
from lightning_dct.embedding.collected import RowCollectives
from lightning_dct.embedding.optimizers import refuse_optimizers_without_rows
from lightning_dct.embedding.owners import (
    Int64Array,
    RowOwners,
    UnmadeRows,
    in_parts,
    initial_rows,
    place_tables,
)
from lightning_dct.embedding.pruning import PIECES, KeptPieces
from lightning_dct.embedding.tables import EmbeddingTable, fill_rows


class OwnedRows(CompressedModule):
    """The rows of some tables that this rank owns; :class:`~lightning_dct.ShardedEmbeddingBags`
    exchanges them.

    Args:
        tables: The tables, of one dim and dtype.
        seed: Seeds the initial rows.
        refresh_every: Optimizer steps between two exact selections of the thresholds.
    """

    exchange_group: RowCollectives
    placement: RowOwners

    def __init__(self, tables: list[EmbeddingTable], seed: int, refresh_every: int) -> None:
        super().__init__(refresh_every)
        self.tables = tables
        self.features = Features.of(tables)
        self.table_rows = [int(table.rows) for table in tables]
        self.num_rows = sum(self.table_rows)  # the most of all ranks together
        self.embedding_dim = tables[0].dim
        self.seed = seed
        bounds = np.array([table.interval for table in tables], dtype=np.float64)
        # Of each table, half the width and the middle of the interval of its initial values.
        self.initial_bound: list[float] = (
            ((bounds[:, 1] - bounds[:, 0]) / 2).astype(np.float32).tolist()
        )
        self._centres: list[float] = (bounds.sum(axis=1) / 2).astype(np.float32).tolist()
        # This rank's rows of all tables, [owned rows, embedding_dim]; their kept pieces if they are
        # pruned.
        self.weight: Tensor = cast(Any, UnmadeRows)(dtype=tables[0].dtype)
        # Rows that were loaded before there was a place for them, of each table.
        self._loaded: Sequence[Tensor] | None = None
        # Whether `state_dict` leaves the rows out, while a strategy saves or loads, which has files
        # for them.
        self.saved_in_shards = False
        # Of pruned rows; see `pruning`.
        self.kept: KeptPieces | None = None
        # How often each row was requested, int32 ``[owned rows]``; only while a pruning is planned.
        self.row_requests: Tensor | None = None

    @property
    def described(self) -> list[dict[str, Any]]:
        """The descriptions of all tables as plain values."""
        return [table.described() for table in self.tables]

    @property
    def is_materialized(self) -> bool:
        """Whether this rank's rows exist."""
        return not isinstance(self.weight, UnmadeRows)

    def materialize(self) -> None:
        """Make this rank's rows, once; a collective call if there are several ranks.

        Rows of whole tables that were loaded before become this rank's, as far as it owns them. So
        do those that a process made by itself, before it became one of several; of growing tables
        it must have made none.
        """
        if self.is_materialized:
            if not (
                dist.is_initialized() and self.placement.world_size == 1 < dist.get_world_size()
            ):
                return
            made = self.weight
            self._loaded = self._made_alone()
            self.weight = cast(Any, UnmadeRows)(made.requires_grad, made.device, made.dtype)
        if not torch.sparse.check_sparse_tensor_invariants.is_enabled():
            # This is the default. Setting it keeps torch's sparse optimizers from warning.
            torch.sparse.check_sparse_tensor_invariants.disable()
        self.exchange_group = RowCollectives.among_all(self.weight.device)
        self.placement = self.place(self.exchange_group.world_size)
        cast(UnmadeRows, self.weight).materialize((self.capacity(), self.embedding_dim))
        self.initialize_rows()
        self.reset_memory()
        refuse_optimizers_without_rows(self)
        if self._loaded is not None:
            self.load_tables(self._loaded)

    def _made_alone(self) -> Sequence[Tensor] | None:
        """The rows of all tables, made before the ranks start, of which this process becomes one."""
        return self.own_rows(np.arange(self.capacity())).split(self.table_rows)

    def load_tables(self, whole: Sequence[Tensor]) -> None:
        """Overwrite this rank's rows with those of whole tables, ``[rows, dim]`` each, in the order
        of the tables.

        Before :meth:`materialize` the tensors are kept, as they are, until then. Call it on every
        rank.

        Raises:
            ValueError: A table has another shape.
        """
        shapes = [(rows, self.embedding_dim) for rows in self.table_rows]
        for table, rows, shape in zip(self.tables, whole, shapes, strict=True):
            if rows.shape != shape:
                raise ValueError(
                    f"Table {table.name!r} has shape {list(rows.shape)} instead of {list(shape)}."
                )
        self._loaded = whole
        if self.is_materialized:
            self._loaded = None
            self.set_kept(None)
            for number, start, stop, place in self.placement.ranges(self.exchange_group.rank):
                for places in in_parts(start, stop):
                    at = place + int(places[0]) - start
                    self.weight.detach()[at : at + places.size] = whole[number][
                        places[0] : places[-1] + 1
                    ].to(self.weight)
            self.rows_replaced()

    def _take(self, rows: Tensor, masks: Tensor | None) -> None:
        """Overwrite this rank's rows with these, of all tables or of this rank, and the masks of
        their pieces.
        """
        is_whole = rows.shape == (sum(self.table_rows), self.embedding_dim)
        if is_whole and masks is None:
            self.load_tables(rows.split(self.table_rows))
            return
        if is_whole and masks is not None:
            own = self.placement.numbers_of(self.exchange_group.rank)
            rows = rows[own]
            masks = masks[own]
        self.set_kept(None if masks is None else KeptPieces(masks.numpy()))
        if self.kept is None:
            self.weight.detach().copy_(rows)
        else:
            self.kept.compact(
                self.weight.detach(), np.arange(self.capacity()), rows.to(self.weight)
            )

    def place(self, world_size: int) -> RowOwners:
        """Decide which rank owns which row."""
        return place_tables(self.table_rows, world_size)

    def capacity(self) -> int:
        """The number of rows of this rank's ``weight``."""
        return self.placement.owned_rows[self.exchange_group.rank]

    @property
    def num_places(self) -> int | None:
        """The number of places of this rank's rows; None if they are keys of growing tables."""
        return self.capacity() if self.placement.has_numbers else None

    def initialize_rows(self) -> None:
        """Set all of this rank's rows to their initial values."""
        rank = self.exchange_group.rank
        weight = self.weight.detach()
        for places in in_parts(0, len(weight)):
            weight[places[0] : places[-1] + 1] = self.initial(rank, places)
        for number, start, stop, place in self.placement.ranges(rank):
            if callable(self.tables[number].initial):
                fill_rows(
                    self.tables[number],
                    self.seed,
                    number,
                    start,
                    weight[place : place + stop - start],
                )

    def initial(self, owner: int, places: Int64Array) -> Tensor:
        """The initial values of an owner's rows, ``[n, embedding_dim]``, as ``weight`` holds them.

        Zeros for tables whose rows a function makes: only their owners know them.
        """
        return to_device(self.initial_on_host(owner, places), self.weight.device)

    def initial_on_host(self, owner: int, places: Int64Array) -> Tensor:
        """The same on the CPU."""
        tables, rows = self.placement.rows_of(owner, places)
        made = initial_rows(
            self.seed, tables, rows, self.initial_bound, self.embedding_dim, self._centres
        )
        return made.to(self.weight.dtype)

    def reset_memory(self) -> None:
        """Drop all that is remembered of other ranks, as before the first step."""
        raise NotImplementedError

    def rows_replaced(self, places: Int64Array | None = None) -> None:
        """Send these rows, or all of this rank's, whole when they are next requested: they were
        replaced.
        """
        raise NotImplementedError

    def own_rows(self, places: Int64Array, places_there: Tensor | None = None) -> Tensor:
        """A copy of this rank's rows at some places, ``[n, embedding_dim]``, without a gradient.

        ``places_there`` are the same on the device of the rows, if they are there already.
        """
        if self.kept is None:
            if places_there is None:
                places_there = to_device(torch.from_numpy(places), self.weight.device)
            return self.weight.detach().index_select(0, places_there)
        initial = self.initial(self.exchange_group.rank, places)
        return self.kept.expand(self.weight.detach(), places, initial)

    def rows_in_place(
        self, places: Int64Array, places_there: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """A matrix of a dtype, and where in it the rows at some places are, for whoever only reads
        them: this rank's rows themselves where that can be.
        """
        if self.kept is None and self.weight.dtype == dtype:
            return self.weight.detach(), places_there
        rows = self.own_rows(places, places_there).to(dtype)
        return rows, torch.arange(len(rows), device=rows.device)

    def set_kept(self, kept: KeptPieces | None) -> None:
        """Change which pieces of rows there are; their values are to be loaded next."""
        self.kept = kept
        whole = (self.capacity(), self.embedding_dim)
        shape = whole if kept is None else (kept.num_pieces, self.embedding_dim // PIECES)
        if self.weight.shape != shape:
            self.weight.grad = None
            self.weight.data = self.weight.new_empty(shape)

    def resolve(self, places: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Map places (``[k]``, int64, ascending) and their gradients to rows of ``weight``,
        ascending, and theirs.
        """
        if self.kept is None:
            return places, gradient
        found, at = (part.to(places.device) for part in self.kept.find(places.cpu().numpy()))
        return at, gradient.view(-1, self.weight.shape[1])[found]

    def note_requests(self, places: list[Int64Array]) -> None:
        """Use the requests for this rank's rows in a training look-up: distinct places of each
        rank.
        """
        if self.row_requests is not None:
            for requested in places:
                self.row_requests[torch.from_numpy(requested)] += 1

    def get_extra_state(self) -> dict[str, Any]:
        """The clock, and what pruning needs if the ``state_dict`` has the rows."""
        state = super().get_extra_state()
        if self.kept is not None and not self.saved_in_shards:
            state["kept"] = torch.from_numpy(self.kept.masks.copy())
        if self.row_requests is not None and not self.saved_in_shards:
            state["row_requests"] = self.row_requests.clone()
        return state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore both; which pieces are kept is restored with the rows."""
        super().set_extra_state(state)
        if not self.saved_in_shards:
            self.row_requests = state["row_requests"].clone() if "row_requests" in state else None

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.saved_in_shards and self.is_materialized and self.exchange_group.peers:
            warnings.warn(
                f"`state_dict()` of {self.name!r} has the rows of rank {self.exchange_group.rank}"
                " only. Save a checkpoint with the Trainer, or write whole tables with"
                " `lightning_dct.gather_tables`.",
                stacklevel=2,
            )
        if self.saved_in_shards:
            del destination[f"{prefix}weight"]
        elif self.kept is not None:
            # Whole rows, so that every module can load them.
            destination[f"{prefix}weight"] = self.own_rows(np.arange(self.capacity()))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        key = f"{prefix}weight"
        dim = self.embedding_dim
        is_loaded = key in state_dict and state_dict[key] is None  # by `load_tables`
        rows = state_dict.pop(key, None)
        masks = state_dict.get(f"{prefix}_extra_state", {}).get("kept")
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        missing = arguments[2]
        errors = arguments[4]
        # While tables are saved in shards, their rows are in files of their own.
        if key in missing and (rows is not None or is_loaded or self.saved_in_shards):
            missing.remove(key)
        elif key in missing and f"{prefix}_extra_state" in state_dict and arguments[1]:  # strict
            # Of a Trainer's checkpoint; a state dict of other names lacks both.
            errors.append(
                f"`{key}` is in the folder beside a Trainer's checkpoint: use"
                " `trainer.fit(ckpt_path=...)`."
            )
        if self.is_materialized:
            self.rows_replaced()
        is_whole = rows is not None and rows.shape == (sum(self.table_rows), dim)
        if rows is None or (self.saved_in_shards and not is_whole):
            return
        if self.is_materialized and (is_whole or rows.shape == (self.capacity(), dim)):
            self._take(rows, masks)
        elif is_whole:
            self._loaded = rows.detach().clone().split(self.table_rows)
        else:
            or_own = f", or the {self.capacity()} of this rank" if self.is_materialized else ""
            errors.append(
                f"`{key}` has shape {list(rows.shape)}. Give the rows of all tables, one table"
                f" after the other: {sum(self.table_rows)}{or_own}, of {dim} entries each."
            )
