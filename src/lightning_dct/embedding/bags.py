"""The look-ups of a batch: checks and flattens ids and offsets, finds the distinct rows, pools rows
into bags.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from lightning_dct.compress.awaited import to_device
from lightning_dct.embedding.owners import ID_SPACE, Int64Array, RowOwners
from lightning_dct.embedding.tables import EmbeddingTable
from lightning_dct.kernels import add_in_order, compiled

# Told where an id of a growing table is negative.
HASHES = (
    "Make ids of strings by `lightning_dct.string_ids`, and other hashes positive by `ids & (2**63"
    " - 1)`. Python's `hash` of a string makes no ids: it is another number in each process."
)


class Features(NamedTuple):
    """The features of some tables, in the order of the tables."""

    names: tuple[str, ...]
    table_of: tuple[int, ...]  # of each feature, the number of its table
    is_mean: tuple[bool, ...]  # of each feature, whether its bags are averaged
    table_rows: tuple[int, ...]  # of each table
    table_names: tuple[str, ...]

    @classmethod
    def of(cls, tables: Sequence[EmbeddingTable]) -> "Features":
        """The features of some tables."""
        listed = [
            (name, number, table) for number, table in enumerate(tables) for name in table.features
        ]
        names, numbers, owners = zip(*listed, strict=True)
        is_mean = tuple(table.pooling == "mean" for table in owners)
        rows = tuple(table.rows for table in tables)
        return cls(names, numbers, is_mean, rows, tuple(table.name for table in tables))


@dataclass(frozen=True)
class Bags:
    """Flattened look-ups, on the CPU but for weights.

    A bag's number is ``sample * features + feature``, or counts through feature after feature if
    features have different numbers of samples.
    """

    tables: Tensor  # shape `[lookups]`, int64
    rows: Tensor  # shape `[lookups]`, int64
    # Shape `[lookups]`, int64: the bag of each look-up; None if each bag has one look-up, in this
    # order.
    bags: Tensor | None
    divisors: Tensor | None  # shape `[bags, 1]`, int64: of each bag's sum; None for plain sums
    weights: Tensor | None  # shape `[lookups]`: factors of rows
    shape: tuple[int, ...]  # of the bags: `[samples, features]` or `[bags]`

    @property
    def is_one_each(self) -> bool:
        """Whether each bag is one look-up, so that pooling changes nothing."""
        return self.bags is None and self.divisors is None and self.weights is None

    def pool(self, rows: Tensor) -> Tensor:
        """Sum or average rows (``[lookups, dim]``), times their weights, into bags (``[*shape,
        dim]``).
        """
        if self.weights is not None:
            rows = rows * self.weights.to(rows).unsqueeze(1)
        if self.bags is None and self.divisors is None:
            return rows.view(*self.shape, rows.shape[1])
        pooled: Tensor = PoolRows.apply(rows, self)
        return pooled

    def sums(self, rows: Tensor) -> Tensor:
        """The bags' sums or means, without weights."""
        pooled = rows
        if self.bags is not None:
            pooled = rows.new_zeros(int(np.prod(self.shape)), rows.shape[1])
            add_in_order(pooled, to_device(self.bags, rows.device), rows)
        if self.divisors is not None:
            pooled = pooled / to_device(self.divisors, rows.device)
        return pooled.view(*self.shape, rows.shape[1])

    def spread(self, gradient: Tensor) -> Tensor:
        """Map the gradient of bags (``[*shape, dim]``) to that of look-ups (``[lookups, dim]``),
        without weights.
        """
        flat = gradient.reshape(-1, gradient.shape[-1])
        if self.divisors is not None:
            flat = flat / to_device(self.divisors, flat.device)
        return (
            flat if self.bags is None else flat.index_select(0, to_device(self.bags, flat.device))
        )


class PoolRows(torch.autograd.Function):
    """Pools the rows of look-ups: forward is :meth:`Bags.sums`, backward :meth:`Bags.spread`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bags: Bags) -> Tensor:
        """The bags."""
        ctx.bags = bags
        return bags.sums(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient of each row."""
        return ctx.bags.spread(gradient), None


def read_bags(
    ids: Tensor,
    offsets: Tensor | None,
    features: Features,
    weights: Tensor | None = None,
    samples: Sequence[int] | None = None,
) -> Bags:
    """Check and flatten ids and offsets as :meth:`lightning_dct.ShardedEmbeddingBags.forward` takes
    them.

    Raises:
        TypeError: One of them is no tensor.
        ValueError: Shapes, dtypes or offsets are not as there.
        IndexError: An id is out of its table's range; the message names both.
    """
    number = len(features.names)
    for name, given in (("ids", ids), ("offsets", offsets), ("per_sample_weights", weights)):
        _check_is_tensor(name, given)
    for name, given in (("ids", ids), ("offsets", offsets)):
        if given is not None and (
            given.is_floating_point() or given.is_complex() or given.dtype == torch.bool
        ):
            raise ValueError(
                f"`{name}` must be whole numbers, int64 or int32; they are {given.dtype}."
            )
    ids, offsets = _on_host(ids, offsets)
    table_of = torch.tensor(features.table_of, device=ids.device)
    bags: Tensor | None
    divisors: Tensor | None
    if offsets is None:
        if ids.ndim != 2 or ids.shape[1] != number:
            raise ValueError(
                f"Without `offsets`, `ids` must have the shape [samples, {number}] (one row for"
                f" each feature); they have {list(ids.shape)}. Give `offsets` for bags of several"
                " rows."
            )
        flat = ids.reshape(-1)
        tables = table_of.repeat(len(ids))
        shape = tuple(ids.shape)
        bags = divisors = None
    else:
        flat = ids
        bags, divisors, shape = _read_offsets(flat, offsets, features, samples)
        feature = (
            bags % number
            if len(shape) == 2
            else torch.bucketize(bags, _ends_of(samples, bags), right=True)
        )
        tables = table_of[feature]
    if weights is not None and (weights.shape != flat.shape or not weights.is_floating_point()):
        raise ValueError(
            f"`per_sample_weights` must be one floating-point number for each of the {flat.numel()}"
            f" look-ups; they have shape {list(weights.shape)} and dtype {weights.dtype}."
        )
    _check_range(flat, tables, features)
    return Bags(tables, flat, bags, divisors, weights, shape)


def _on_host(ids: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both as int64 on the CPU; the host of a device waits once."""
    ids = ids.detach()
    if offsets is None:
        return ids.to("cpu", torch.int64), None
    offsets = offsets.detach()
    if ids.is_cpu or ids.device != offsets.device:
        return ids.to("cpu", torch.int64), offsets.to("cpu", torch.int64)
    both = torch.cat([ids.reshape(-1).long(), offsets.reshape(-1).long()]).cpu()
    return both[: ids.numel()].view(ids.shape), both[ids.numel() :].view(offsets.shape)


def _check_is_tensor(name: str, given: Any) -> None:
    if isinstance(given, Tensor) or (given is None and name != "ids"):
        return
    of_strings = " Ids of strings are made by `lightning_dct.string_ids`." if name == "ids" else ""
    raise TypeError(
        f"`{name}` must be a tensor, and it is {type(given).__name__!r}. Make one of a list or an"
        f" array by `torch.as_tensor({name})`.{of_strings}"
    )


def _read_offsets(
    flat: Tensor, ends: Tensor, features: Features, samples: Sequence[int] | None
) -> tuple[Tensor, Tensor | None, tuple[int, ...]]:
    """The bag of each look-up, the bags' divisors, and their shape."""
    number = len(features.names)
    if samples is not None and len(samples) != number:
        raise ValueError(
            f"`samples` must have a number for each of the {number} features; it has"
            f" {len(samples)}."
        )
    num_bags = ends.numel() - 1
    fits = num_bags % number == 0 if samples is None else num_bags == sum(samples)
    if flat.ndim != 1 or ends.ndim != 1 or num_bags < 0 or not fits:
        bags_asked = f"{number} * samples" if samples is None else str(sum(samples))
        raise ValueError(
            f"With `offsets`, `ids` must have the shape [lookups] and `offsets` [{bags_asked} + 1];"
            f" they have {list(flat.shape)} and {list(ends.shape)}."
        )
    lengths = ends.diff()
    if bool((ends[0] != 0) | (ends[-1] != flat.numel()) | (lengths < 0).any()):
        raise ValueError(f"`offsets` must ascend from 0 to the number of look-ups, {flat.numel()}.")
    given = torch.repeat_interleave(
        torch.arange(num_bags, device=flat.device), lengths, output_size=flat.numel()
    )
    counts = lengths.clamp(min=1)
    is_mean = torch.tensor(features.is_mean, device=flat.device)
    if samples is None:  # from feature after feature to sample after sample
        each = num_bags // number
        bags = given % max(each, 1) * number + given // max(each, 1)
        divisors = torch.where(is_mean, counts.view(number, each).T, 1).reshape(-1, 1)
        shape: tuple[int, ...] = (each, number)
    else:
        of_bags = is_mean.repeat_interleave(
            torch.tensor(samples, device=flat.device), output_size=num_bags
        )
        bags = given
        divisors = torch.where(of_bags, counts, 1).view(-1, 1)
        shape = (num_bags,)
    return bags, divisors if any(features.is_mean) else None, shape


def _ends_of(samples: Sequence[int] | None, like: Tensor) -> Tensor:
    """Where the bags of each feature end."""
    return torch.tensor(samples, device=like.device).cumsum(0)


def _check_range(flat: Tensor, tables: Tensor, features: Features) -> None:
    ends = torch.tensor([rows - 1 for rows in features.table_rows], device=flat.device)
    if (loops := compiled("cpu", loops="numba_ids")) is not None and loops.are_inside(
        flat.contiguous().numpy(), tables.numpy(), ends.numpy()
    ):
        return
    last = ends[tables]
    bad = (flat < 0) | (flat > last)
    if not bad.any():
        return
    first = int(bad.to(torch.uint8).argmax())
    table = int(tables[first])
    rows = features.table_rows[table]
    if rows == ID_SPACE:
        has = "takes ids from 0 to 2**63 - 1"
        remedy = HASHES
    else:
        has = f"has {rows} rows"
        remedy = "Correct the ids or the number of rows."
    raise IndexError(
        f"Id {int(flat[first])} is out of range: table {features.table_names[table]} {has}"
        f" ({int(bad.sum())} of {flat.numel()} ids are out of range). {remedy}"
    )


def distinct(keys: Int64Array, number: int | None = None) -> tuple[Int64Array, Int64Array]:
    """Distinct keys from 0, ascending, and the number of each key among them. They are below
    ``number`` if it is given.
    """
    if (loops := compiled("cpu", loops="numba_ids")) is not None:
        return cast(tuple[Int64Array, Int64Array], loops.distinct(keys, number))
    found, inverse = np.unique(keys, return_inverse=True)
    return found, inverse.reshape(-1)


class DistinctRows:
    """The distinct rows of some bags, by owner.

    Attributes:
        bags: The look-ups.
        wanted: For each owner, the places there: ascending, distinct.
        sizes: For each owner, the number of them.
        lookups: For each owner, the number of look-ups of these rows.
        own_there: The places of this rank's own rows, on the device.
        inverse: Shape ``[lookups]``, int64: the distinct row of each look-up, counted through all
            owners.
    """

    def __init__(
        self, bags: Bags, placement: RowOwners, own_rank: int, device: torch.device
    ) -> None:
        owners, places = placement.locate(bags.tables.numpy(), bags.rows.numpy())
        self.bags = bags
        self.wanted: list[Int64Array] = []
        if placement.has_numbers:
            ends = np.cumsum([0, *placement.owned_rows])
            found, inverse = distinct(ends[owners] + places, int(ends[-1]))
            cuts = np.searchsorted(found, ends).tolist()
            for rank, start in enumerate(cuts[:-1]):
                self.wanted.append(found[start : cuts[rank + 1]] - ends[rank])
        else:
            inverse = np.empty(places.size, dtype=np.int64)
            number = 0
            for rank in range(placement.world_size):
                here = np.flatnonzero(owners == rank)
                wanted, which = distinct(places[here])
                inverse[here] = number + which
                number += wanted.size
                self.wanted.append(wanted)
        self.sizes = [wanted.size for wanted in self.wanted]
        self.lookups = np.bincount(owners, minlength=placement.world_size)
        own = self.wanted[own_rank]
        numbers = to_device(torch.from_numpy(np.concatenate([inverse, own])), device)
        self.inverse, self.own_there = numbers.split([inverse.size, own.size])
