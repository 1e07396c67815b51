"""The state of sharded tables on one rank: its rows, and the copies and residuals for the rows that it exchanges."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Self

from lightning_dct.activations.module import CompressedModule
from lightning_dct.embedding.cache import RememberedRows, check_memory
from lightning_dct.embedding.collected import CollectedGradients, RowCollectives
from lightning_dct.embedding.owners import Int64Array, RowOwners, in_parts, initial_rows, place_tables
from lightning_dct.embedding.pruning import PIECES, KeptPieces
from lightning_dct.traffic import Traffic


class UnmadeRows(nn.parameter.UninitializedParameter):
    """Rows before :meth:`TableState.materialize`, which can be frozen already."""

    _allowed_methods: ClassVar[Any] = [
        *vars(nn.parameter.UninitializedTensorMixin)["_allowed_methods"],  # type: ignore[attr-defined]
        Tensor.requires_grad_,
    ]


class TableState(CompressedModule):
    """The part of :class:`~lightning_dct.ShardedEmbeddingBags` that look-ups, evaluation and checkpoints use.

    The subclass sets the settings, and :meth:`materialize` the rest.
    """

    # This rank's rows of all tables, [owned rows, embedding_dim]; their kept pieces if they are pruned.
    weight: Tensor
    table_rows: list[int]
    embedding_dim: int
    density: float
    value_format: str
    cache_rows: int
    seed: int
    initial_bounds: np.typing.NDArray[np.float32]
    placement: RowOwners
    exchange_group: RowCollectives
    peers: list[int]  # the other ranks
    remembered_dtype: torch.dtype  # fp64 for fp64 rows, else fp32
    held: dict[int, RememberedRows]  # by owner, this rank's copies of other ranks' rows
    mirrors: dict[int, RememberedRows]  # by user, the other ranks' copies of this rank's rows
    collected: CollectedGradients  # of this rank's rows

    def __init__(self, refresh_every: int) -> None:
        super().__init__(refresh_every)
        self.weight = UnmadeRows()
        # Rows of all tables that were loaded before this rank's rows were made.
        self._loaded: Tensor | None = None
        # Whether `state_dict` leaves the rows out, while a strategy saves or loads, which has files for them.
        self.saved_in_shards = False
        # Of pruned rows; see `pruning`.
        self.kept: KeptPieces | None = None
        # How often each row was requested, int32 ``[owned rows]``; only while a pruning is planned.
        self.row_requests: Tensor | None = None
        # Counts the exact rows that are read outside training.
        self.evaluation_traffic = Traffic()
        # All such modules of the model, if there are several; set by a strategy.
        self.evaluated_with: tuple[TableState, ...] = ()

    @property
    def is_materialized(self) -> bool:
        """Whether this rank's rows exist."""
        return not isinstance(self.weight, UnmadeRows)

    def materialize(self) -> None:
        """Make this rank's rows, once; a collective call if there are several ranks.

        Rows of whole tables that were loaded before become this rank's, as far as it owns them. So do those that a
        process made by itself, before it became one of several.
        """
        if self.is_materialized:
            if not (dist.is_initialized() and self.placement.world_size == 1 < dist.get_world_size()):
                return
            made, self._loaded = self.weight, self.own_rows(np.arange(self.capacity()))
            self.kept = None
            self.weight = cast(Any, UnmadeRows)(made.requires_grad, made.device, made.dtype)
        if not torch.sparse.check_sparse_tensor_invariants.is_enabled():
            # This is the default. Setting it keeps torch's sparse optimizers from warning.
            torch.sparse.check_sparse_tensor_invariants.disable()
        self.exchange_group = RowCollectives.among_all(self.weight.device)
        rank, world_size = self.exchange_group.rank, self.exchange_group.world_size
        self.placement = self.place(world_size)
        self.peers = [peer for peer in range(world_size) if peer != rank]
        cast(UnmadeRows, self.weight).materialize((self.capacity(), self.embedding_dim))
        self.remembered_dtype = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        with torch.no_grad():
            self.initialize_rows()
            if self._loaded is not None:
                self.weight.copy_(self._own_of(self._loaded))
        self.reset_memory()
        if self._loaded is not None:
            self._loaded = None
            self.rows_replaced()

    def _own_of(self, whole: Tensor) -> Tensor:
        """This rank's rows of those of all tables, one after the other, ``[num_rows, ...]``."""
        places = np.arange(self.capacity())
        tables, rows = self.placement.rows_of(self.exchange_group.rank, places)
        return whole[torch.from_numpy(np.cumsum([0, *self.table_rows])[tables] + rows)]

    def place(self, world_size: int) -> RowOwners:
        """Decide which rank owns which row."""
        return place_tables(self.table_rows, world_size)

    def capacity(self) -> int:
        """The number of rows of this rank's ``weight``."""
        return self.placement.owned_rows[self.exchange_group.rank]

    def initialize_rows(self) -> None:
        """Set all of this rank's rows to their initial values."""
        for places in in_parts(0, len(self.weight)):
            self.weight[places[0] : places[-1] + 1] = self.initial(self.exchange_group.rank, places)

    def reset_memory(self) -> None:
        """Drop all copies, residuals and thresholds, as before the first step."""
        empty = self.weight.new_empty(0, self.embedding_dim, dtype=self.remembered_dtype)

        def remembered(owner: int, with_residual: bool) -> RememberedRows:
            universe, initial = self.placement.owned_rows[owner], partial(self.initial, owner)
            return RememberedRows(self.cache_rows, universe, len(self.table_rows), initial, empty, with_residual)

        self.held = {peer: remembered(peer, True) for peer in self.peers}
        self.mirrors = {peer: remembered(self.exchange_group.rank, False) for peer in self.peers}
        self.collected = CollectedGradients()
        # The last look-up, until its answers are taken; and those whose gradients may be sent.
        self.latest_lookup: Any = None
        self.lookups: list[Any] = []
        self.refresh_requested = True

    @property
    def num_rows(self) -> int:
        """The most rows of all ranks together."""
        return sum(self.table_rows)

    @property
    def remembered(self) -> tuple[RememberedRows, ...]:
        """The copies and mirrors; none before :meth:`materialize`."""
        return (*self.held.values(), *self.mirrors.values()) if self.is_materialized else ()

    def initial(self, owner: int, places: Int64Array) -> Tensor:
        """The initial values of an owner's rows, ``[n, embedding_dim]``, as ``weight`` holds them."""
        tables, rows = self.placement.rows_of(owner, places)
        return initial_rows(self.seed, tables, rows, self.initial_bounds, self.embedding_dim).to(self.weight)

    def rows_replaced(self, places: Int64Array | None = None) -> None:
        """Have the other ranks receive these of this rank's rows whole, or all, because they were replaced."""
        for mirror in self.mirrors.values():
            mirror.replaced(places)

    def own_rows(self, places: Int64Array) -> Tensor:
        """A copy of this rank's rows at some places, ``[n, embedding_dim]``, without a gradient."""
        if self.kept is None:
            return self.weight.detach().index_select(0, torch.from_numpy(places).to(self.weight.device))
        initial = self.initial(self.exchange_group.rank, places)
        return self.kept.expand(self.weight.detach(), places, initial)

    def note_requests(self, places: list[Int64Array]) -> None:
        """Use the requests for this rank's rows in a training look-up: distinct places of each rank."""
        if self.row_requests is not None:
            for requested in places:
                self.row_requests[torch.from_numpy(requested)] += 1

    def resolve(self, places: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Map places (``[k]``, int64, ascending) and their gradients to rows of ``weight``, ascending, and theirs."""
        if self.kept is None:
            return places, gradient
        found, at = (part.to(places.device) for part in self.kept.find(places.cpu().numpy()))
        return at, gradient.view(-1, self.weight.shape[1])[found]

    def set_kept(self, kept: KeptPieces | None) -> None:
        """Change which pieces of rows there are; their values are to be loaded next."""
        self.kept = kept
        shape = (self.capacity(), self.embedding_dim)
        if kept is not None:
            shape = (kept.num_pieces, self.embedding_dim // PIECES)
        if self.weight.shape != shape:
            self.weight.grad = None
            self.weight.data = self.weight.new_empty(shape)

    def thresholds_in_use(self) -> list[float]:
        """The thresholds of both directions."""
        return [float(value) for rows in self.remembered for value in rows.thresholds if value]

    def residual_norm(self) -> float:
        """Euclidean norm of the gradients that this rank has not sent yet."""
        # Mirrors have no residual, so they add nothing.
        return sum(float(rows.residual.norm(dtype=torch.float64)) ** 2 for rows in self.remembered) ** 0.5

    def compression_state(self) -> dict[str, Any]:
        """This rank's copies, residuals, thresholds and collected gradients; none before :meth:`materialize`."""
        if not self.is_materialized:
            return {}
        if self.latest_lookup is not None:
            self.latest_lookup.take_answers()
        return {
            "placement": asdict(self.placement),
            "held": {peer: rows.state_dict() for peer, rows in self.held.items()},
            "mirrors": {peer: rows.state_dict() for peer, rows in self.mirrors.items()},
            "collected": [(places.cpu(), gradient.cpu()) for places, gradient in self.collected.parts],
        }

    def load_compression_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore this rank's state, or the states of all ranks of another world size.

        With another world size, copies start from the rows' initial values, and the residuals of all ranks are added to
        the next gradient, scaled so that the model receives the same sum.

        Raises:
            CheckpointError: The states are of other tables, or corrupt.
        """
        kind, device = type(self.placement), self.weight.device
        for state in states:
            check_memory(state, self.table_rows, self.embedding_dim, kind)
        if len(states) == 1 and states[0]["placement"] == asdict(self.placement):
            for saved, rows in (("held", self.held), ("mirrors", self.mirrors)):
                for peer, state in states[0][saved].items():
                    rows[peer].load_state_dict(state)
            self.collected = CollectedGradients((p.to(device), part.to(device)) for p, part in states[0]["collected"])
            return
        self.reset_memory()
        for old_rank, state in enumerate(states):
            old = kind(**state["placement"])
            pieces = [(old_rank, places.numpy(), gradient) for places, gradient in state["collected"]]
            for owner, rows in state["held"].items():
                row_at = rows["cache"]["row_at"]
                pieces.append((owner, row_at[row_at >= 0].numpy(), rows["residual"][row_at >= 0]))
            for owner, places, gradient in pieces:
                owners, now = self.placement.locate(*old.rows_of(owner, places))
                mine = torch.from_numpy(np.flatnonzero(owners == self.exchange_group.rank))
                scale = self.placement.world_size / old.world_size
                kept = gradient[mine].to(device, self.remembered_dtype) * scale
                self.collected.add(torch.from_numpy(now)[mine].to(device), kept)

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy or a file, with all messages that are under way."""
        if self.is_materialized:
            if self.latest_lookup is not None:
                self.latest_lookup.take_answers()
            self.collected.wait()
        return {**self.__dict__, "lookups": []}  # their backward ends at the original

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move copies, residuals and collected gradients together with the rows."""
        super()._apply(fn, recurse)
        device = self.weight.device
        if self.is_materialized and self.exchange_group.device != device:
            self.exchange_group.device = device
            for rows in self.remembered:
                rows.move(device)
            self.collected = CollectedGradients((p.to(device), part.to(device)) for p, part in self.collected.parts)
        return self

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

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.saved_in_shards:
            del destination[f"{prefix}weight"]
        elif self.kept is not None:
            # Whole rows, so that every module can load them.
            destination[f"{prefix}weight"] = self.own_rows(np.arange(self.capacity()))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        key = f"{prefix}weight"
        whole, missing, errors = state_dict.get(key), arguments[2], arguments[4]
        is_whole = whole is not None and whole.shape == (sum(self.table_rows), self.embedding_dim)
        if self.saved_in_shards and not is_whole:
            state_dict[key] = self.weight.detach()  # the rows are in files of their own
        elif not self.is_materialized and is_whole:
            self._loaded = state_dict.pop(key).detach().clone()
        elif self.is_materialized and whole is not None:
            masks = state_dict.get(f"{prefix}_extra_state", {}).get("kept")
            if is_whole:
                whole, masks = self._own_of(whole), None if masks is None else self._own_of(masks)
            self.set_kept(None if masks is None else KeptPieces(masks.numpy()))
            if self.kept is not None:
                packed = self.weight.detach().clone()
                self.kept.pack(packed, np.arange(self.capacity()), whole.to(packed))
                whole = packed
            state_dict[key] = whole
        given = state_dict.get(key)
        if given is not None and not (self.is_materialized and given.shape == self.weight.shape):
            rows = f", or the {len(self.weight)} of this rank" if self.is_materialized else ""
            errors.append(
                f"`{key}` has shape {list(given.shape)}. Give the rows of all tables, one table after the other:"
                f" {sum(self.table_rows)}{rows}, of {self.embedding_dim} entries each."
            )
            del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if whole is not None and key not in state_dict and key in missing:
            missing.remove(key)
        if self.is_materialized:
            self.rows_replaced()


@contextmanager
def saved_in_shards(tables: Mapping[str, TableState]) -> Iterator[None]:
    """Leave the rows of tables to files of their own: out of ``state_dict``, and as they are in ``load_state_dict``."""
    for module in tables.values():
        module.saved_in_shards = True
    try:
        yield
    finally:
        for module in tables.values():
            module.saved_in_shards = False
