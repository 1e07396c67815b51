"""Embedding bags whose tables are spread over the ranks, which exchange changes instead of
values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from lightning_dct.checksums import CheckpointError
from lightning_dct.config import VALUE_FORMATS, check_choice, check_density, check_integer
from lightning_dct.embedding.cache import UNBOUNDED
from lightning_dct.embedding.collected import CollectedGradients
from lightning_dct.embedding.exact import ExactReader, exact_round
from lightning_dct.embedding.first_parts import Rooms
from lightning_dct.embedding.lookup import ChangesLookup, EvictedRows, look_up, send_evicted
from lightning_dct.embedding.on_device import DeferredReads
from lightning_dct.embedding.owned_rows import OwnedRows
from lightning_dct.embedding.owners import Int64Array
from lightning_dct.embedding.store import RowStore, default_room
from lightning_dct.embedding.store_state import ENDS, as_one_store, check_memory, unsent_gradients
from lightning_dct.embedding.tables import EmbeddingTable, Pooling, described_tables
from lightning_dct.traffic import Traffic


class ShardedEmbeddingBags(OwnedRows):
    """Embedding tables spread over the ranks, which send each other thresholded *changes* instead
    of values.

    A rank requests each distinct row of a batch once. The owner sends the entries that have changed
    by more than their table's threshold since it last sent them. The rank sums the gradients of a
    row and sends the entries above another threshold. Both ends keep the rest and send it later.
    The sum over ranks is divided by the number of ranks, so any number of ranks trains the same
    model.

    ``weight`` has this rank's rows of all tables, shape ``[owned rows, embedding_dim]``. Its
    gradient is sparse: use ``SGD``, ``Adagrad``, ``SparseAdam`` or
    :class:`~lightning_dct.RowWiseAdagrad`. ``DCTStrategy`` creates it with :meth:`materialize` when
    the processes have started. Under another strategy of the Trainer, call that in
    ``configure_model``, and put the parameter's name into ``_ddp_params_and_buffers_to_ignore`` of
    the LightningModule; its checkpoints have the rows of rank 0 only.

    Where no gradient is wanted, in evaluation or of frozen tables, every rank reads exact rows. A
    rank without further batches answers the others until all have finished
    (:meth:`finish_evaluation`, which ``DCTStrategy`` calls).

    Example::

        tables = ShardedEmbeddingBags([1000, 20000, 7], embedding_dim=16)
        lookup = tables.request(ids)     # int64 [batch, 3]; starts the exchange of rows
        hidden = bottom(dense)           # runs during the exchange
        pooled = lookup.pooled()         # float [batch, 3, 16]

        items = EmbeddingTable("items", 20000, 16, pooling="mean", features=("bought", "seen"))
        tables = ShardedEmbeddingBags([items, EmbeddingTable("users", 1000, 16)])
        pooled = tables(ids, offsets)    # float [batch, 3, 16]: bought, seen, users

    Args:
        tables: An :class:`~lightning_dct.EmbeddingTable` for each table, with one dim and one
            dtype. Or the number of rows of each table: all then have the ``embedding_dim``,
            ``pooling`` and ``initial_bound`` below.
        embedding_dim: Entries a row, if ``tables`` are numbers.
        pooling: ``"sum"`` or ``"mean"`` of a bag's rows, if ``tables`` are numbers; ``"sum"`` when
            None. An empty bag is zero.
        density: Share of the requested rows' entries that each direction sends in a step, in (0,
            1].
        value_format: ``"fp32"``, ``"bf16"``, ``"2bit"`` or ``"1bit"``, with one scale per table
            and message. The rounding error is sent later.
        refresh_every: Optimizer steps between two exact selections of the thresholds. In between, a
            guard moves them a little in every step, to keep the number of entries near its target.
        cache_rows: Most rows of other ranks to remember, of all of them together. When None, as
            many as copies, residuals, the owners' copies of those and their index fit into twice
            the bytes of a rank's share of all rows, or into 64 MiB if that is more. The residual of
            an evicted row is sent: in fp32 or bf16 if ``value_format`` is that, else in int8 with a scale for
            the row. A remembered row takes ``8 * dim + 98`` bytes here and ``4 * dim + 98`` on its
            owner, at most.
        initial_bound: Rows start uniform on ``[-bound, bound)``, if ``tables`` are numbers; ``1 /
            sqrt(rows)`` of each table when None.
        seed: Seeds the initial rows.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting is out of range.
    """

    agreed = (
        *OwnedRows.agreed,
        *(
            "table_rows",
            "embedding_dim",
            "described",
            "density",
            "value_format",
            "cache_rows",
            "seed",
        ),
    )
    # Keys of growing tables whose rows did not fit.
    evicted_on_load: Int64Array = np.empty(0, dtype=np.int64)

    def __init__(
        self,
        tables: Sequence[int] | Sequence[EmbeddingTable],
        embedding_dim: int | None = None,
        *,
        pooling: Pooling | None = None,
        density: float = 0.05,
        value_format: str = "1bit",
        refresh_every: int = 1000,
        cache_rows: int | None = None,
        initial_bound: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            described_tables(tables, embedding_dim, pooling, initial_bound), seed, refresh_every
        )
        check_density("density", density)
        check_choice("value_format", value_format, VALUE_FORMATS)
        if cache_rows is not None:
            check_integer("cache_rows", cache_rows, minimum=1)
        self.density = density
        self.value_format = value_format
        self.cache_rows = cache_rows
        # Counts the exact rows that are read outside training.
        self.evaluation_traffic = Traffic()
        # All such modules of the model, if there are several; set by a strategy.
        self.evaluated_with: tuple[ShardedEmbeddingBags, ...] = ()

    def extra_repr(self) -> str:
        """The text of ``print``."""
        return (
            f"{len(self.table_rows)} tables, {self.num_rows} rows,"
            f" embedding_dim={self.embedding_dim}, density={self.density},"
            f" value_format={self.value_format!r}"
        )

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        samples: Sequence[int] | None = None,
    ) -> Tensor:
        """Look rows up and pool them: :meth:`request`, then ``pooled``.

        Args:
            ids: Whole numbers, ``[batch, features]``; with offsets ``[lookups]``, feature after
                feature. A table has one feature if its description names no others.
            offsets: ``[features * batch + 1]``: where each bag starts, feature 0 first, and the
                end. Bags may be empty.
            per_sample_weights: One factor for the row of each look-up, in the shape of flattened
                ``ids``. They get a gradient if they want one. A mean is the weighted sum over the
                number of rows.
            samples: The number of bags of each feature, if features have different numbers of them.

        Returns:
            Float ``[batch, features, dim]``; with ``samples`` ``[sum(samples), dim]``, feature
            after feature.

        Raises:
            TypeError: One of them is no tensor, on any rank. Raised on every rank, like the next.
            ValueError: Shapes or dtypes are not as above, on any rank. Raised on every rank.
            IndexError: An id is out of its table's range, on any rank. Raised on every rank.
        """
        return self.request(ids, offsets, per_sample_weights, samples).pooled()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # of collectives and arrays of numpy
    def request(
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        samples: Sequence[int] | None = None,
    ) -> ChangesLookup | ExactReader:
        """Start the exchange of rows. Arguments as for :meth:`forward`.

        Of the result ``pooled()`` waits for the rows and pools them, and ``rows()`` gives that of
        each look-up.
        """
        if not self.is_materialized:
            raise RuntimeError(
                "The tables have no rows yet. Use `Trainer(strategy='dct')`, or call"
                " `materialize()` in `configure_model` (or, without a Trainer, after"
                " `init_process_group`)."
            )
        return look_up(self, ids, offsets, per_sample_weights, samples)

    def finish_evaluation(self) -> None:
        """Answer the other ranks until all are out of batches: one collective call for all
        ``evaluated_with``.
        """
        if self.is_materialized and self.exchange_group.peers:
            while exact_round(self, None) is not None:
                pass

    def reset_memory(self) -> None:
        """Drop all copies, residuals and thresholds, as before the first step."""
        empty = self.weight.new_empty(0, self.embedding_dim, dtype=self.remembered_dtype)
        rank = self.exchange_group.rank
        peers = self.exchange_group.peers
        owned = self.placement.owned_rows
        num_peers = self.placement.world_size
        num_tables = len(self.table_rows)
        of_owners = {peer: owned[peer] for peer in peers}
        of_users = dict.fromkeys(peers, owned[rank])
        # This rank's copies of other ranks' rows, and the other ranks' copies of this rank's rows.
        self.own_copies: RowStore = RowStore(
            self.room(), of_owners, num_peers, num_tables, self.initial_on_host, empty, True
        )
        self.peer_copies: RowStore = RowStore(
            UNBOUNDED, of_users, num_peers, num_tables, self._own_initial, empty, False
        )
        self.collected: CollectedGradients = CollectedGradients()
        self.reads: DeferredReads = DeferredReads()  # numbers that the host will need
        self.lookups: list[ChangesLookup] = []  # those whose gradients may be sent
        # Which of the look-ups before the last backward it has reached.
        self.usually_reached: tuple[bool, ...] = ()
        # Of the look-ups since the last backward, what has left caches.
        self.evicted: list[EvictedRows] = []
        self.rooms: Rooms = Rooms.between(peers)
        self.refresh_requested = True

    def _own_initial(self, user: int, places: Int64Array) -> Tensor:
        """The initial values of this rank's rows, whoever uses them."""
        return self.initial_on_host(self.exchange_group.rank, places)

    def room(self) -> int:
        """The number of other ranks' rows that this rank remembers."""
        if self.cache_rows is not None:
            return self.cache_rows
        own_rows = -(-self.num_rows // self.placement.world_size)
        row_bytes = self.embedding_dim * self.weight.element_size()
        return default_room(own_rows, self.embedding_dim, row_bytes, self.remembered_dtype.itemsize)

    @property
    def remembered_dtype(self) -> torch.dtype:
        """That of copies, residuals and gradients on their way: fp32, or fp64 as the rows."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    @property
    def remembered(self) -> tuple[RowStore, ...]:
        """This rank's copies, and those of its peers; none before :meth:`materialize`."""
        return (self.own_copies, self.peer_copies) if self.is_materialized else ()

    def take_answers(self) -> None:
        """Wait for the answers to the latest look-up, if they are under way, and add them to the
        copies.
        """
        for lookup in self.lookups[-1:]:
            lookup.take_answers()

    def rows_replaced(self, places: Int64Array | None = None) -> None:
        """Have the other ranks receive these of this rank's rows whole, or all, because they were
        replaced.
        """
        self.peer_copies.replaced(places)

    def thresholds_in_use(self) -> list[float]:
        """The thresholds of both directions."""
        if self.is_materialized:
            self.reads.now()
        return [float(value) for rows in self.remembered for value in rows.thresholds.flat if value]

    def residual_norm(self) -> float:
        """Euclidean norm of the gradients that this rank has not sent yet; copies of peers have none."""
        return (
            sum(float(rows.residual.norm(dtype=torch.float64)) ** 2 for rows in self.remembered)
            ** 0.5
        )

    def compression_state(self) -> dict[str, Any]:
        """This rank's copies, residuals, thresholds and collected gradients; none before
        :meth:`materialize`.
        """
        if not self.is_materialized:
            return {}
        self.take_answers()
        send_evicted(self)
        self.reads.now()
        return {
            "placement": asdict(self.placement),
            "held": self.own_copies.state_dict(),
            "mirrors": self.peer_copies.state_dict(),
            "collected": [
                (places.cpu(), gradient.cpu()) for places, gradient in self.collected.parts
            ],
        }

    def load_compression_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore this rank's state, or the states of all ranks of another world size.

        With another world size, copies start from the rows' initial values, and the residuals of
        all ranks are added to the next gradient, scaled so that the model receives the same sum.

        Raises:
            CheckpointError: The states are of other tables, or corrupt.
        """
        kind = type(self.placement)
        states = [as_one_store(state, len(self.table_rows), self.embedding_dim) for state in states]
        placements = [
            check_memory(state, self.table_rows, self.embedding_dim, kind) for state in states
        ]
        if placements == [self.placement]:
            for end, rows in zip(ENDS, self.remembered, strict=True):
                if states[0][end]["codes"].keys() != rows.codes.keys():
                    raise CheckpointError(
                        f"The checkpoint's memory of sharded tables has {end!r} of other ranks."
                    )
                rows.load_state_dict(states[0][end])
            self.collected = CollectedGradients(states[0]["collected"])
            self.reads = DeferredReads()
            self.evicted = []
            self.rooms = Rooms.between(self.exchange_group.peers)
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
            self.reads.now()
        return {**self.__dict__, "lookups": []}  # their backward ends at the original

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move copies and residuals together with the rows, and change their dtype."""
        super()._apply(fn, recurse)
        if self.is_materialized:
            self.reads.now()
            self.exchange_group.device = self.weight.device
            self.evicted = [one.on(self.weight.device) for one in self.evicted]
            for rows in self.remembered:
                rows.move(self.weight.device, self.remembered_dtype)
        return self


class ShardedEmbeddings(ShardedEmbeddingBags):
    """:class:`ShardedEmbeddingBags` whose rows are not pooled, for sequences: a row for each
    look-up.
    """

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        samples: Sequence[int] | None = None,
    ) -> Tensor:
        """Look rows up: :meth:`request`, then ``rows``.

        Arguments and errors are those of the base class.

        Returns:
            Float ``[batch, features, dim]`` without offsets; with them ``[lookups, dim]``, in the
            order of ``ids``.
        """
        if per_sample_weights is not None:
            raise ValueError(
                "Rows that are not pooled have no `per_sample_weights`: multiply them yourself."
            )
        rows = self.request(ids, offsets, None, samples).rows()
        return rows if offsets is not None else rows.view(*ids.shape, -1)
