"""Embedding bags whose tables are spread over the ranks, which exchange changes instead of values."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_dct.config import VALUE_FORMATS, check_choice, check_density, check_integer
from lightning_dct.embedding.bags import read_bags
from lightning_dct.embedding.collected import FAULT
from lightning_dct.embedding.lookup import ANNOUNCED, ANNOUNCED_EXACT, ChangesLookup, ExactReader, exact_round
from lightning_dct.embedding.state import TableState

Pooling = Literal["sum", "mean"]


class ShardedEmbeddingBags(TableState):
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
        self.embedding_dim = embedding_dim
        self.pooling = pooling
        self.density = density
        self.value_format = value_format
        self.cache_rows = cache_rows
        self.seed = seed
        bounds = [1 / math.sqrt(rows) if initial_bound is None else initial_bound for rows in self.table_rows]
        self.initial_bounds = np.array(bounds, dtype=np.float32)

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
            offsets: ``[tables * batch + 1]``: where each bag starts, all bags of table 0 first, and the end. Bags may
                be empty.

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
        is_exact = not (self.weight.requires_grad and torch.is_grad_enabled())
        try:
            bags = read_bags(ids, offsets, self.table_rows, self.pooling)
        except (IndexError, ValueError) as fault:
            # The others wait for an announcement. With this one they all fail.
            exchange = ((self.evaluated_with or (self,))[0] if is_exact else self).exchange_group
            numbers = np.full((exchange.world_size, ANNOUNCED_EXACT if is_exact else ANNOUNCED), FAULT)
            exchange.announce(numbers, self.traffic, fault=fault)
            raise
        if is_exact:
            return ExactReader(self, bags)
        if self.refresh_requested:
            for rows in self.remembered:
                rows.thresholds[:] = 0
            self.refreshed()
        return ChangesLookup(self, bags)

    def finish_evaluation(self) -> None:
        """Answer the other ranks until all are out of batches: one collective call for all ``evaluated_with``."""
        modules = self.evaluated_with or (self,)
        while self.is_materialized and modules[0].peers and not exact_round(modules, modules[0], None)[0]:
            pass

    def agreed_settings(self) -> dict[str, Any]:
        """The settings that must be the same on every rank, by name."""
        names = ("table_rows", "embedding_dim", "pooling", "density", "value_format", "cache_rows", "seed")
        own = {name: getattr(self, name) for name in names}
        return {**super().agreed_settings(), **own, "initial_bound": self.initial_bounds.tolist()}
