"""The look-ups of a batch: checks and flattens ids and offsets, finds the distinct rows, pools rows into bags."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lightning_dct.embedding.owners import ID_SPACE, Int64Array, RowOwners
from lightning_dct.kernels import add_in_order

Pooling = Literal["sum", "mean"]


@dataclass(frozen=True)
class Bags:
    """Flattened look-ups."""

    tables: Int64Array  # shape `[lookups]`
    rows: Int64Array  # shape `[lookups]`
    # Shape `[lookups]`, int64 on the model's device: `sample * tables + table`; None if each bag has one look-up, in
    # this order.
    bags: Tensor | None
    divisors: Tensor | None  # shape `[bags, 1]`, int64: of each bag's sum; None for plain sums
    num_samples: int
    num_tables: int

    def pool(self, rows: Tensor) -> Tensor:
        """Sum or average rows (``[lookups, dim]``) into bags (``[samples, tables, dim]``)."""
        pooled = rows
        if self.bags is not None:
            pooled = rows.new_zeros(self.num_samples * self.num_tables, rows.shape[1])
            add_in_order(pooled, self.bags, rows)
        if self.divisors is not None:
            pooled = pooled / self.divisors
        return pooled.view(self.num_samples, self.num_tables, rows.shape[1])

    def spread(self, gradient: Tensor) -> Tensor:
        """Map the gradient of bags (``[samples, tables, dim]``) to that of look-ups (``[lookups, dim]``).

        If each bag has one look-up, the gradient of bags is that of look-ups already.
        """
        if self.bags is None:
            return gradient
        flat = gradient.reshape(self.num_samples * self.num_tables, gradient.shape[2])
        return (flat if self.divisors is None else flat / self.divisors).index_select(0, self.bags)


def read_bags(ids: Tensor, offsets: Tensor | None, table_rows: Sequence[int], pooling: str) -> Bags:
    """Check and flatten ids and offsets as :meth:`lightning_dct.ShardedEmbeddingBags.forward` takes them.

    Raises:
        ValueError: Shapes, dtypes or offsets are not as there.
        IndexError: An id is out of its table's range; the message names both.
    """
    num_tables = len(table_rows)
    for name, given in (("ids", ids), ("offsets", offsets)):
        if given is not None and (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool):
            raise ValueError(f"`{name}` must be whole numbers, int64 or int32; they are {given.dtype}.")
    if offsets is None:
        if ids.ndim != 2 or ids.shape[1] != num_tables:
            raise ValueError(
                f"Without `offsets`, `ids` must have the shape [samples, {num_tables}] (one row of each table); they"
                f" have {list(ids.shape)}. Give `offsets` for bags of several rows."
            )
        num_samples, flat = ids.shape[0], ids.detach().cpu().numpy().astype(np.int64).reshape(-1)
        tables = np.tile(np.arange(num_tables, dtype=np.int64), num_samples)
        bags = divisors = None
    else:
        flat, ends = ids.detach().cpu().numpy().astype(np.int64), offsets.detach().cpu().numpy().astype(np.int64)
        num_samples, odd = divmod(ends.size - 1, num_tables)
        if ids.ndim != 1 or offsets.ndim != 1 or ends.size == 0 or odd:
            raise ValueError(
                f"With `offsets`, `ids` must have the shape [lookups] and `offsets` [{num_tables} * samples + 1]; they"
                f" have {list(ids.shape)} and {list(offsets.shape)}."
            )
        lengths = np.diff(ends)
        if ends[0] != 0 or ends[-1] != flat.size or (lengths < 0).any():
            raise ValueError(f"`offsets` must ascend from 0 to the number of look-ups, {flat.size}.")
        by_table = np.repeat(np.arange(num_tables * num_samples), lengths)
        tables, samples = np.divmod(by_table, max(num_samples, 1))
        bags = torch.from_numpy(samples * num_tables + tables).to(ids.device)
        divisors = None
        if pooling == "mean":
            counts = torch.from_numpy(lengths.reshape(num_tables, num_samples).T.copy()).to(ids.device)
            divisors = counts.clamp(min=1).reshape(-1, 1)
    bad = (flat < 0) | (flat > np.array([rows - 1 for rows in table_rows], dtype=np.int64)[tables])
    if bad.any():
        first = int(bad.argmax())
        rows = table_rows[tables[first]]
        if rows == ID_SPACE:
            has, remedy = "takes ids from 0 to 2**63 - 1", "Make hashes positive: `ids & (2**63 - 1)`."
        else:
            has, remedy = f"has {rows} rows", "Correct the ids or `table_rows`."
        raise IndexError(
            f"Id {flat[first]} is out of range: table {tables[first]} {has}"
            f" ({int(bad.sum())} of {flat.size} ids are out of range). {remedy}"
        )
    return Bags(tables, flat, bags, divisors, num_samples, num_tables)


class DistinctRows:
    """The distinct rows of some bags, by owner.

    Attributes:
        bags: The look-ups.
        wanted: For each owner, the places there: ascending, distinct.
        sizes: For each owner, the number of them.
        lookups: For each owner, the number of look-ups of these rows.
        inverse: Shape ``[lookups]``, int64: the distinct row of each look-up, counted through all owners.
    """

    def __init__(self, bags: Bags, placement: RowOwners, device: torch.device) -> None:
        owners, places = placement.locate(bags.tables, bags.rows)
        inverse = np.empty(places.size, dtype=np.int64)
        self.bags = bags
        self.wanted: list[Int64Array] = []
        start = 0
        # Owner by owner, because keys of growing tables leave no bits for the owner.
        for rank in range(placement.world_size):
            here = np.flatnonzero(owners == rank)
            wanted, which = np.unique(places[here], return_inverse=True)
            inverse[here] = start + which.reshape(-1)
            start += wanted.size
            self.wanted.append(wanted)
        self.sizes = [wanted.size for wanted in self.wanted]
        self.lookups = np.bincount(owners, minlength=placement.world_size)
        self.inverse = torch.from_numpy(inverse).to(device)
