"""Embedding bags whose tables are spread over the ranks, which exchange changes instead of values."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self

from lightning_dct.activations.module import CompressedModule
from lightning_dct.config import VALUE_FORMATS, check_choice, check_density, check_integer
from lightning_dct.embedding.bags import Pooling
from lightning_dct.embedding.cache import RememberedRows, check_memory, unsent_gradients
from lightning_dct.embedding.collected import CollectedGradients, RowCollectives
from lightning_dct.embedding.lookup import ChangesLookup, ExactReader, exact_round, look_up
from lightning_dct.embedding.owners import Int64Array, RowOwners, UnmadeRows, in_parts, initial_rows, place_tables
from lightning_dct.embedding.pruning import PIECES, KeptPieces
from lightning_dct.traffic import Traffic


class ShardedEmbeddingBags(CompressedModule):
    """Embedding tables spread over the ranks, which send each other thresholded *changes* instead of values.

    A rank requests each distinct row of a batch once. The owner sends the entries that have changed by more than their
    table's threshold since it last sent them. The rank sums the gradients of a row and sends the entries above another
    threshold. Both ends keep the rest and send it later. The sum over ranks is divided by the number of ranks, so any
    number of ranks trains the same model.

    ``weight`` has this rank's rows of all tables, shape ``[owned rows, embedding_dim]``. Its gradient is sparse: use
    ``SGD``, ``Adagrad``, ``SparseAdam`` or :class:`~lightning_dct.RowWiseAdagrad`. ``DCTStrategy`` creates it with
    :meth:`materialize` when the processes have started. Under another strategy of the Trainer, call that in
    ``configure_model``, and put the parameter's name into ``_ddp_params_and_buffers_to_ignore`` of the LightningModule;
    its checkpoints have the rows of rank 0 only.

    Where no gradient is wanted, in evaluation or of frozen tables, every rank reads exact rows. A rank without further
    batches answers the others until all have finished (:meth:`finish_evaluation`, which ``DCTStrategy`` calls).

    Example::

        tables = ShardedEmbeddingBags([1000, 20000, 7], embedding_dim=16)
        lookup = tables.request(ids)     # int64 [batch, 3]; starts the exchange of rows
        hidden = bottom(dense)           # runs during the exchange
        pooled = lookup.pooled()         # float [batch, 3, 16]

    Args:
        table_rows: Rows of each table.
        embedding_dim: Entries a row.
        pooling: ``"sum"`` or ``"mean"`` of a bag's rows; an empty bag is zero.
        density: Share of the requested rows' entries that each direction sends in a step, in (0, 1].
        value_format: ``"fp32"``, ``"bf16"``, ``"2bit"`` or ``"1bit"``, with one scale per table
            and message. The rounding error is sent later.
        refresh_every: Optimizer steps between two exact selections of the thresholds. In between, a guard moves them a
            little in every step, to keep the number of entries near its target.
        cache_rows: Most rows of each other rank to remember. The residual of an evicted row is sent: in fp32
            or bf16 if ``value_format`` is that, else in int8 with a scale for the row. A remembered row takes
            ``8 * embedding_dim`` bytes here and ``4 * embedding_dim`` on its owner.
        initial_bound: Rows start uniform on ``[-bound, bound)``; ``1 / sqrt(rows)`` of each table when None.
        seed: Seeds the initial rows.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting is out of range.
    """

    agreed = (
        *CompressedModule.agreed,
        *("table_rows", "embedding_dim", "pooling", "density", "value_format", "cache_rows", "initial_bound", "seed"),
    )
    evicted_on_load: Int64Array = np.empty(0, dtype=np.int64)  # keys of growing tables whose rows did not fit

    def __init__(
        self,
        table_rows: Sequence[int],
        embedding_dim: int,
        *,
        pooling: Pooling = "sum",
        density: float = 0.05,
        value_format: str = "1bit",
        refresh_every: int = 1000,
        cache_rows: int = 1 << 18,
        initial_bound: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(refresh_every)
        if not isinstance(table_rows, Sequence):
            raise TypeError(f"`table_rows` must list the number of rows of each table, got {table_rows!r}.")
        if not table_rows:
            raise ValueError("`table_rows` is empty: give the number of rows of each table.")
        for table, rows in enumerate(table_rows):
            check_integer(f"table_rows[{table}]", rows, minimum=1)
        if initial_bound is not None and not 0 <= initial_bound < math.inf:
            raise ValueError(f"`initial_bound` must be a number of at least 0; got {initial_bound!r}.")
        check_integer("embedding_dim", embedding_dim, minimum=1)
        check_choice("pooling", pooling, ("sum", "mean"))
        check_density("density", density)
        check_choice("value_format", value_format, VALUE_FORMATS)
        check_integer("cache_rows", cache_rows, minimum=1)
        self.table_rows = [int(rows) for rows in table_rows]
        self.num_rows = sum(self.table_rows)  # the most of all ranks together
        self.embedding_dim = embedding_dim
        self.pooling = pooling
        self.density = density
        self.value_format = value_format
        self.cache_rows, self.seed = cache_rows, seed
        bounds = [1 / math.sqrt(rows) if initial_bound is None else initial_bound for rows in self.table_rows]
        self.initial_bound: list[float] = np.array(bounds, dtype=np.float32).tolist()  # of each table
        # This rank's rows of all tables, [owned rows, embedding_dim]; their kept pieces if they are pruned.
        self.weight: Tensor = UnmadeRows()
        # Rows that were loaded before there was a place for them, of all tables or of this rank.
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
        self.evaluated_with: tuple[ShardedEmbeddingBags, ...] = ()

    def extra_repr(self) -> str:
        """The text of ``print``."""
        return (
            f"{len(self.table_rows)} tables, {self.num_rows} rows, embedding_dim={self.embedding_dim},"
            f" density={self.density}, value_format={self.value_format!r}"
        )

    def forward(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Look rows up and pool them: :meth:`request`, then ``pooled``.

        Args:
            ids: Whole numbers, ``[batch, tables]``; with offsets ``[lookups]``, table after table.
            offsets: ``[tables * batch + 1]``: where each bag starts, table 0 first, and the end. Bags may be empty.

        Returns:
            Float ``[batch, tables, embedding_dim]``.

        Raises:
            ValueError: Shapes or dtypes are not as above, on any rank. Raised on every rank.
            IndexError: An id is out of its table's range, on any rank. Raised on every rank.
        """
        return self.request(ids, offsets).pooled()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # of collectives and arrays of numpy
    def request(self, ids: Tensor, offsets: Tensor | None = None) -> ChangesLookup | ExactReader:
        """Start the exchange of rows; ``pooled()`` of the result waits for them. Arguments as for :meth:`forward`."""
        if not self.is_materialized:
            raise RuntimeError(
                "The tables have no rows yet. Use `Trainer(strategy='dct')`, or call `materialize()` in"
                " `configure_model` (or, without a Trainer, after `init_process_group`)."
            )
        return look_up(self, ids, offsets)

    def finish_evaluation(self) -> None:
        """Answer the other ranks until all are out of batches: one collective call for all ``evaluated_with``."""
        if self.is_materialized and self.exchange_group.peers:
            while exact_round(self, None) is not None:
                pass

    @property
    def is_materialized(self) -> bool:
        """Whether this rank's rows exist."""
        return not isinstance(self.weight, UnmadeRows)

    def materialize(self) -> None:
        """Make this rank's rows, once; a collective call if there are several ranks.

        Rows of whole tables that were loaded before become this rank's, as far as it owns them. So do those that a
        process made by itself, before it became one of several; of growing tables it must have made none.
        """
        if self.is_materialized:
            if not (dist.is_initialized() and self.placement.world_size == 1 < dist.get_world_size()):
                return
            made, self._loaded = self.weight, self._made_alone()
            self.weight = cast(Any, UnmadeRows)(made.requires_grad, made.device, made.dtype)
        if not torch.sparse.check_sparse_tensor_invariants.is_enabled():
            # This is the default. Setting it keeps torch's sparse optimizers from warning.
            torch.sparse.check_sparse_tensor_invariants.disable()
        self.exchange_group: RowCollectives = RowCollectives.among_all(self.weight.device)
        self.placement: RowOwners = self.place(self.exchange_group.world_size)
        cast(UnmadeRows, self.weight).materialize((self.capacity(), self.embedding_dim))
        self.initialize_rows()
        self.reset_memory()
        if self._loaded is not None:
            self._take(self._loaded, None)
            self._loaded = None

    def _made_alone(self) -> Tensor | None:
        """The rows of all tables, for the ranks that this process becomes one of."""
        return self.own_rows(np.arange(self.capacity()))

    def _take(self, rows: Tensor, masks: Tensor | None) -> None:
        """Overwrite this rank's rows with these, of all tables or of this rank, and the masks of their pieces."""
        if rows.shape == (sum(self.table_rows), self.embedding_dim):
            own = self.placement.numbers_of(self.exchange_group.rank)
            rows, masks = rows[own], None if masks is None else masks[own]
        self.set_kept(None if masks is None else KeptPieces(masks.numpy()))
        if self.kept is None:
            self.weight.detach().copy_(rows)
        else:
            self.kept.pack(self.weight.detach(), np.arange(self.capacity()), rows.to(self.weight))

    def place(self, world_size: int) -> RowOwners:
        """Decide which rank owns which row."""
        return place_tables(self.table_rows, world_size)

    def capacity(self) -> int:
        """The number of rows of this rank's ``weight``."""
        return self.placement.owned_rows[self.exchange_group.rank]

    def initialize_rows(self) -> None:
        """Set all of this rank's rows to their initial values."""
        for places in in_parts(0, len(self.weight)):
            self.weight.detach()[places[0] : places[-1] + 1] = self.initial(self.exchange_group.rank, places)

    def reset_memory(self) -> None:
        """Drop all copies, residuals and thresholds, as before the first step."""
        empty = self.weight.new_empty(0, self.embedding_dim, dtype=self.remembered_dtype)

        def remembered(owner: int, with_residual: bool) -> RememberedRows:
            universe, initial = self.placement.owned_rows[owner], partial(self.initial, owner)
            return RememberedRows(self.cache_rows, universe, len(self.table_rows), initial, empty, with_residual)

        rank, peers = self.exchange_group.rank, self.exchange_group.peers
        # By owner, this rank's copies of other ranks' rows; and by user, the other ranks' copies of this rank's rows.
        self.held: dict[int, RememberedRows] = {peer: remembered(peer, True) for peer in peers}
        self.mirrors: dict[int, RememberedRows] = {peer: remembered(rank, False) for peer in peers}
        self.collected: CollectedGradients = CollectedGradients()
        self.lookups: list[ChangesLookup] = []  # those whose gradients may be sent
        self.refresh_requested = True

    @property
    def remembered_dtype(self) -> torch.dtype:
        """That of copies, residuals and gradients on their way: fp32, or fp64 as the rows."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    @property
    def remembered(self) -> tuple[RememberedRows, ...]:
        """The copies and mirrors; none before :meth:`materialize`."""
        return (*self.held.values(), *self.mirrors.values()) if self.is_materialized else ()

    def initial(self, owner: int, places: Int64Array) -> Tensor:
        """The initial values of an owner's rows, ``[n, embedding_dim]``, as ``weight`` holds them."""
        tables, rows = self.placement.rows_of(owner, places)
        return initial_rows(self.seed, tables, rows, self.initial_bound, self.embedding_dim).to(self.weight)

    def take_answers(self) -> None:
        """Wait for the answers to the latest look-up, if they are under way, and add them to the copies."""
        for lookup in self.lookups[-1:]:
            lookup.take_answers()

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
        whole = (self.capacity(), self.embedding_dim)
        shape = whole if kept is None else (kept.num_pieces, self.embedding_dim // PIECES)
        if self.weight.shape != shape:
            self.weight.grad = None
            self.weight.data = self.weight.new_empty(shape)

    def thresholds_in_use(self) -> list[float]:
        """The thresholds of both directions."""
        return [float(value) for rows in self.remembered for value in rows.thresholds if value]

    def residual_norm(self) -> float:
        """Euclidean norm of the gradients that this rank has not sent yet; mirrors have none."""
        return sum(float(rows.residual.norm(dtype=torch.float64)) ** 2 for rows in self.remembered) ** 0.5

    def compression_state(self) -> dict[str, Any]:
        """This rank's copies, residuals, thresholds and collected gradients; none before :meth:`materialize`."""
        if not self.is_materialized:
            return {}
        self.take_answers()
        return {
            "placement": asdict(self.placement),
            "held": {peer: rows.state_dict() for peer, rows in self.held.items()},
            "mirrors": {peer: rows.state_dict() for peer, rows in self.mirrors.items()},
            "collected": [(places.cpu(), gradient.cpu()) for places, gradient in self.collected.wait()],
        }

    def load_compression_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore this rank's state, or the states of all ranks of another world size.

        With another world size, copies start from the rows' initial values, and the residuals of all ranks are added to
        the next gradient, scaled so that the model receives the same sum.

        Raises:
            CheckpointError: The states are of other tables, or corrupt.
        """
        kind = type(self.placement)
        placements = [check_memory(state, self.table_rows, self.embedding_dim, kind) for state in states]
        if placements == [self.placement]:
            for saved, rows in (("held", self.held), ("mirrors", self.mirrors)):
                for peer, state in states[0][saved].items():
                    rows[peer].load_state_dict(state)
            self.collected = CollectedGradients(states[0]["collected"])
            self.rows_replaced(self.evicted_on_load)
            return
        self.reset_memory()
        for tables, numbers, gradient in unsent_gradients(states, placements):
            scale = self.placement.world_size / placements[0].world_size
            owners, places = self.placement.locate(tables, numbers)
            own = torch.from_numpy(np.flatnonzero(owners == self.exchange_group.rank))
            self.collected.add(torch.from_numpy(places)[own], gradient[own] * scale)

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy or a file, with all messages that are under way."""
        if self.is_materialized:
            self.take_answers()
            self.collected.wait()
        return {**self.__dict__, "lookups": []}  # their backward ends at the original

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move copies and residuals together with the rows, and change their dtype."""
        super()._apply(fn, recurse)
        if self.is_materialized:
            self.exchange_group.device = self.weight.device
            for rows in self.remembered:
                rows.move(self.weight.device, self.remembered_dtype)
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
        key, dim = f"{prefix}weight", self.embedding_dim
        rows, masks = state_dict.pop(key, None), state_dict.get(f"{prefix}_extra_state", {}).get("kept")
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        missing, errors = arguments[2], arguments[4]
        # While tables are saved in shards, their rows are in files of their own.
        if key in missing and (rows is not None or self.saved_in_shards):
            missing.remove(key)
        elif key in missing and arguments[1]:  # strict
            errors.append(f"`{key}` is in the folder beside a Trainer's checkpoint: use `trainer.fit(ckpt_path=...)`.")
        if self.is_materialized:
            self.rows_replaced()
        is_whole = rows is not None and rows.shape == (sum(self.table_rows), dim)
        if rows is None or (self.saved_in_shards and not is_whole):
            return
        if self.is_materialized and (is_whole or rows.shape == (self.capacity(), dim)):
            self._take(rows, masks)
        elif is_whole:
            self._loaded = rows.detach().clone()
        else:
            or_own = f", or the {self.capacity()} of this rank" if self.is_materialized else ""
            errors.append(
                f"`{key}` has shape {list(rows.shape)}. Give the rows of all tables, one table after the other:"
                f" {sum(self.table_rows)}{or_own}, of {dim} entries each."
            )
