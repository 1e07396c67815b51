"""Embedding bags whose tables live on different ranks, exchanging changes instead of values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_dct.activations import CompressedModule, SplitPoint
from lightning_dct.config import VALUE_FORMATS, check_choice, check_density, check_integer
from lightning_dct.embedding.bags import read_bags
from lightning_dct.embedding.collected import CollectedGradients
from lightning_dct.embedding.evaluation import ExactReader, serve_until_all_finish
from lightning_dct.embedding.exchange import Exchange
from lightning_dct.embedding.initial import initial_rows
from lightning_dct.embedding.lookup import ChangesLookup
from lightning_dct.embedding.placement import Int64Array, place_tables
from lightning_dct.embedding.resume import memory_of, restore_memory
from lightning_dct.embedding.rows import RememberedRows
from lightning_dct.embedding.values import ValuesLookup
from lightning_dct.traffic import Traffic

Pooling = Literal["sum", "mean"]
# Rows that are filled or copied at a time, so that no second copy of a table ever exists.
ROWS_AT_A_TIME = 1 << 16


class ShardedEmbeddingBags(CompressedModule):
    """Embedding tables spread over the ranks, with thresholded *changes* on the wire instead of values.

    Each distinct row of a batch is asked for once. Its owner sends the entries that have moved by more than their
    table's threshold since this rank last heard of them; the gradients of a row are summed, and the entries above
    another threshold go back. What is not sent is remembered on either side and sent later. The sum over ranks is
    divided by the number of ranks, so any number of ranks trains the same model.

    ``weight`` holds this rank's rows of all tables, shape ``[owned rows, embedding_dim]``. Its gradient is sparse: use
    ``SGD``, ``Adagrad``, ``SparseAdam`` or :class:`~lightning_dct.RowWiseAdagrad`. It exists once the processes are up:
    ``DCTStrategy`` calls :meth:`materialize`; under another strategy call it in ``configure_model``.

    Outside training every rank reads exact rows. A rank that runs out of batches goes on answering the others until
    all are through (:meth:`finish_evaluation`, which ``DCTStrategy`` arranges).

    Example::

        tables = ShardedEmbeddingBags([1000, 20000, 7], embedding_dim=16)
        lookup = tables.request(ids)     # int64 [batch, 3]; rows begin to travel
        hidden = bottom(dense)           # meanwhile
        pooled = lookup.pooled()         # float [batch, 3, 16]

    Args:
        table_rows: Rows of each table.
        embedding_dim: Entries a row.
        pooling: ``"sum"`` or ``"mean"`` of a bag's rows; an empty bag is zero.
        density: Share of the requested rows' entries that is sent a step in each direction, in (0, 1].
        value_format: How they are written: ``"fp32"``, ``"bf16"``, ``"int8"``, ``"int4"`` or ``"1bit"``, with one
            scale a table and message. What rounding loses is sent later.
        refresh_every: Optimizer steps between two exact selections of the thresholds.
        warmup_steps: Optimizer steps over which the density falls from 1.0 to its target.
        warmup_schedule: ``"exponential"`` or ``"linear"``.
        guard: Move the thresholds a little in every step to hold the number of entries near its target.
        exchange: ``"changes"``, or ``"values"``: the paper's method, to compare with. Pooled embeddings cross under a
            mask, and evaluation sees masked embeddings too; of the settings above only the last four matter.
        split: With ``exchange="values"``, the settings of a :class:`~lightning_dct.SplitPoint`; ``select_by`` must be
            ``"magnitude"``.
        cache_rows: Rows of each other rank that are remembered, at most. A row that must make room sends what it
            holds back first. Each takes ``8 * embedding_dim`` bytes here and ``4 * embedding_dim`` on its owner.
        expected_lookups: Look-ups a sample of each table, for balancing the ranks; one each when None.
        initial_bound: Rows start uniform on ``[-bound, bound)``; ``1 / sqrt(rows)`` of each table when None.
        seed: Chooses the initial rows.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting is out of range.
    """

    weight: Tensor

    def __init__(
        self,
        table_rows: Sequence[int],
        embedding_dim: int,
        *,
        pooling: Pooling = "sum",
        density: float = 0.05,
        value_format: str = "1bit",
        refresh_every: int = 1000,
        warmup_steps: int = 0,
        warmup_schedule: str = "exponential",
        guard: bool = True,
        exchange: Literal["changes", "values"] = "changes",
        split: Mapping[str, Any] | None = None,
        cache_rows: int = 1 << 18,
        expected_lookups: Sequence[float] | None = None,
        initial_bound: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(refresh_every, warmup_steps, warmup_schedule)
        if not table_rows:
            raise ValueError("`table_rows` is empty: give the number of rows of each table.")
        for table, rows in enumerate(table_rows):
            check_integer(f"table_rows[{table}]", rows, minimum=1)
        if expected_lookups is not None and len(expected_lookups) != len(table_rows):
            raise ValueError(
                f"`expected_lookups` has {len(expected_lookups)} entries for {len(table_rows)} tables: give one each."
            )
        if expected_lookups is not None and not all(0 <= number < math.inf for number in expected_lookups):
            raise ValueError(f"`expected_lookups` must be numbers of at least 0; got {list(expected_lookups)}.")
        if initial_bound is not None and not 0 <= initial_bound < math.inf:
            raise ValueError(f"`initial_bound` must be a number of at least 0; got {initial_bound!r}.")
        check_integer("embedding_dim", embedding_dim, minimum=1)
        check_choice("pooling", pooling, ("sum", "mean"))
        check_density("density", density)
        check_choice("value_format", value_format, VALUE_FORMATS)
        check_integer("cache_rows", cache_rows, minimum=1)
        check_choice("exchange", exchange, ("changes", "values"))
        if split is not None and exchange != "values":
            raise ValueError("`split` says how values are masked: use it with `exchange='values'`, or leave it out.")
        select_by = (split or {}).get("select_by", "magnitude")
        if select_by != "magnitude":
            raise ValueError(
                f"`split` has select_by={select_by!r}: evaluation masks rows on the rank that uses them, which does not"
                " know the gradients' means of the ranks that own them. Leave `select_by` out, use"
                " exchange='changes', or tables that are not sharded with a `SplitPoint` behind them."
            )
        self.table_rows = [int(rows) for rows in table_rows]
        self.embedding_dim = embedding_dim
        self.pooling = pooling
        self.density = density
        self.value_format = value_format
        self.guard = guard
        self.cache_rows = cache_rows
        self.exchange = exchange
        self.split = {
            "density": 0.2,
            "scope": "group",
            "forward_format": "int4",
            "backward_format": "int4",
            "refresh_every": refresh_every,
            "warmup_steps": warmup_steps,
            "warmup_schedule": warmup_schedule,
            **(split or {}),
        }
        self.expected_lookups = None if expected_lookups is None else list(expected_lookups)
        self.seed = seed
        bounds = [1 / math.sqrt(rows) if initial_bound is None else initial_bound for rows in self.table_rows]
        self._bounds = np.array(bounds, dtype=np.float32)
        self.weight = nn.parameter.UninitializedParameter()
        self.splits: list[SplitPoint] = []
        # Checkpoints leave the rows out: a strategy that saves them in shards sets this.
        self.saved_in_shards = False
        # Reading exact rows outside training is no part of what training sends.
        self.evaluation_traffic = Traffic()
        # All such modules of a model, where there are several: a strategy that knows them sets this.
        self.evaluated_with: tuple[ShardedEmbeddingBags, ...] = ()

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return (
            f"{len(self.table_rows)} tables, {sum(self.table_rows)} rows, embedding_dim={self.embedding_dim},"
            f" density={self.density}, value_format={self.value_format!r}"
        )

    @property
    def is_materialized(self) -> bool:
        """Whether this rank's rows exist."""
        return not isinstance(self.weight, nn.parameter.UninitializedParameter)

    def materialize(self) -> None:
        """Make this rank's rows, once: a collective call where a process group is up."""
        if self.is_materialized:
            return
        if not torch.sparse.check_sparse_tensor_invariants.is_enabled():
            # What is the default anyway: said aloud, it keeps torch's sparse optimizers from warning about it.
            torch.sparse.check_sparse_tensor_invariants.disable()
        self.exchange_group = Exchange.among_all(self.weight.device)
        rank, world_size = self.exchange_group.rank, self.exchange_group.world_size
        self.placement = place_tables(self.table_rows, world_size, self.expected_lookups)
        self.peers = [peer for peer in range(world_size) if peer != rank]
        cast(nn.parameter.UninitializedParameter, self.weight).materialize(
            (self.placement.owned_rows[rank], self.embedding_dim)
        )
        self.remembered_dtype = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        with torch.no_grad():
            for low in range(0, len(self.weight), ROWS_AT_A_TIME):
                places = np.arange(low, min(low + ROWS_AT_A_TIME, len(self.weight)))
                self.weight[low : low + ROWS_AT_A_TIME] = self.initial(rank, places).to(self.weight)
        # One for each rank's batch, as its thresholds go with its owner and its user: no part of the model's state.
        self.splits = [SplitPoint(**{**self.split, "seed": self.seed + peer}) for peer in range(world_size)]
        self.forget()

    def forget(self) -> None:
        """Forget all copies, residuals and thresholds, as before the first step."""

        def remembered(owner: int, with_residual: bool) -> RememberedRows:
            return RememberedRows(
                self.cache_rows,
                self.placement.owned_rows[owner],
                self.embedding_dim,
                len(self.table_rows),
                lambda places: self.initial(owner, places),
                with_residual,
                self.remembered_dtype,
                self.weight.device,
            )

        # Rows of others that this rank uses, and what the others hold of this rank's rows.
        self.held = {peer: remembered(peer, True) for peer in self.peers}
        self.mirrors = {peer: remembered(self.exchange_group.rank, False) for peer in self.peers}
        self.collected = CollectedGradients()
        self.refresh_requested = True

    def initial(self, owner: int, places: Int64Array) -> Tensor:
        """The initial values of an owner's rows, fp32 ``[n, embedding_dim]``."""
        tables, rows = self.placement.rows_of(owner, places)
        return initial_rows(self.seed, tables, rows, self._bounds, self.embedding_dim)

    def own_rows(self, places: Int64Array) -> Tensor:
        """This rank's rows at some places, ``[n, embedding_dim]``: a copy without a gradient."""
        return self.weight.detach().index_select(0, torch.from_numpy(places).to(self.weight.device))

    def forward(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Look rows up and pool them; :meth:`request` and ``pooled`` in one.

        Args:
            ids: Whole numbers, ``[batch, tables]``; with offsets ``[lookups]``, table after table.
            offsets: ``[tables * batch + 1]``: where each bag begins, all bags of table 0 first, and the end.

        Returns:
            Float ``[batch, tables, embedding_dim]``.

        Raises:
            ValueError: Shapes or dtypes are not as above.
            IndexError: An id is out of its table's range.
        """
        return self.request(ids, offsets).pooled()

    def request(self, ids: Tensor, offsets: Tensor | None = None) -> ChangesLookup | ValuesLookup | ExactReader:
        """Ask for rows and let them travel until ``pooled()`` of what this returns is called."""
        if not self.is_materialized:
            raise RuntimeError(
                "The tables are not there yet. Use `Trainer(strategy='dct')`, or call `materialize()` in"
                " `configure_model` (or, without a Trainer, after `init_process_group`)."
            )
        bags = read_bags(ids, offsets, self.table_rows, self.pooling)
        if not (self.training and torch.is_grad_enabled()):
            return ExactReader(self, bags)
        if self.exchange == "values":
            return ValuesLookup(self, bags)
        if self.refresh_requested:
            for remembered in (*self.held.values(), *self.mirrors.values()):
                remembered.thresholds[:] = 0
            self.refreshed()
        return ChangesLookup(self, bags)

    def finish_evaluation(self) -> None:
        """Answer until all ranks are out of batches: a collective call, once for modules ``evaluated_with`` others."""
        if self.is_materialized:
            serve_until_all_finish(self.evaluated_with or (self,))

    def train(self, mode: bool = True) -> Self:
        """Switch training on or off, for masks of values too."""
        for split in self.splits:
            split.train(mode)
        return super().train(mode)

    def advance(self, completed_steps: int) -> None:
        """Tell the module how many optimizer steps are completed."""
        super().advance(completed_steps)
        for split in self.splits:
            split.advance(completed_steps)

    def thresholds_in_use(self) -> list[float]:
        """The thresholds of both directions."""
        if self.exchange == "values":
            return [threshold for split in self.splits for threshold in split.thresholds_in_use()]
        remembered = (*self.held.values(), *self.mirrors.values()) if self.is_materialized else ()
        return [float(value) for rows in remembered for value in rows.thresholds if value]

    def residual_norm(self) -> float:
        """Euclidean norm of the gradients this rank has not sent yet."""
        held = self.held.values() if self.is_materialized else ()
        return float(sum(float(rows.residual.norm(dtype=torch.float64)) ** 2 for rows in held) ** 0.5)

    def agreed_settings(self) -> dict[str, Any]:
        """The settings that must be the same on every rank, by name."""
        names = ("table_rows", "embedding_dim", "pooling", "density", "value_format", "guard", "exchange", "split")
        more = ("cache_rows", "expected_lookups", "seed")
        return {
            **super().agreed_settings(),
            **{name: getattr(self, name) for name in (*names, *more)},
            "initial_bound": self._bounds.tolist(),
        }

    def compression_state(self) -> dict[str, Any]:
        """What this rank remembers; see :mod:`lightning_dct.embedding.resume`."""
        return memory_of(self) if self.is_materialized else {}

    def load_compression_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from what this rank remembered, or from what all ranks of another world did."""
        restore_memory(self, states)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move what is remembered with the rows: strategies move a model when its tables are there already."""
        super()._apply(fn, recurse)
        device = self.weight.device
        if self.is_materialized and self.exchange_group.device != device:
            self.exchange_group.device = device
            for remembered in (*self.held.values(), *self.mirrors.values()):
                remembered.move(device)
            self.collected.parts = [(places.to(device), part.to(device)) for places, part in self.collected.parts]
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.saved_in_shards:
            del destination[f"{prefix}weight"]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        key = f"{prefix}weight"
        if self.saved_in_shards:
            whole = state_dict.get(key)
            own = self.weight.detach()
            if whole is not None and len(whole) == sum(self.table_rows):
                # Saved by a single process without shards: all tables, one after the other.
                tables, rows = self.placement.rows_of(self.exchange_group.rank, np.arange(len(own)))
                own = whole[np.cumsum([0, *self.table_rows])[tables] + rows]
            state_dict[key] = own
        super()._load_from_state_dict(state_dict, prefix, *arguments)
