"""Descriptions of embedding tables: name, rows, dim, pooling, dtype, initial values, and the
features that use them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_dct.config import check_choice, check_integer
from lightning_dct.embedding.owners import ROWS_AT_A_TIME

Pooling = Literal["sum", "mean"]
POOLINGS = ("sum", "mean")
ROW_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class EmbeddingTable:
    """One table, for :class:`~lightning_dct.ShardedEmbeddingBags` and
    :class:`~lightning_dct.ShardedEmbeddings`.

    Attributes:
        name: Its name, for messages and files.
        rows: Number of rows.
        dim: Entries a row, the same for all tables of a module.
        pooling: ``"sum"`` or ``"mean"`` of a bag's rows; an empty bag is zero.
        dtype: That of the rows, the same for all tables of a module; torch's default when None.
        initial: The initial values. A number ``b``: uniform on ``[-b, b)``. Two numbers: uniform
            between them. A function such as ``torch.nn.init.normal_``: it fills rows in place, at
            most 65,536 at a time, from a seed of its own for each part, so the values do not depend
            on the number of ranks. ``1 / sqrt(rows)`` when None. Uniform rows cost no bytes until
            training moves them; those of a function are sent whole once.
        features: The inputs that look rows up here, in the order of the output; ``(name,)`` when
            empty. Several features share the rows.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting is out of range.
    """

    name: str
    rows: int
    dim: int
    pooling: Pooling = "sum"
    dtype: torch.dtype | None = None
    initial: float | tuple[float, float] | Callable[[Tensor], Any] | None = None
    features: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise TypeError(f"The `name` of an embedding table must be a text; got {self.name!r}.")
        check_integer(f"rows of table {self.name!r}", self.rows, minimum=1)
        check_integer(f"dim of table {self.name!r}", self.dim, minimum=1)
        check_choice(f"pooling of table {self.name!r}", self.pooling, POOLINGS)
        if self.dtype not in (None, *ROW_DTYPES):
            raise ValueError(
                f"`dtype` of table {self.name!r} must be one of {ROW_DTYPES}; got {self.dtype!r}."
            )
        if isinstance(self.features, str):
            raise TypeError(
                f"`features` of table {self.name!r} must be a list of names; got {self.features!r}."
            )
        object.__setattr__(self, "features", tuple(self.features) or (self.name,))
        low, high = self.interval
        if not (low <= high and math.isfinite(high - low)):
            raise ValueError(
                f"`initial` of table {self.name!r} must be a number of at least 0, or two finite"
                f" numbers, the lower one first; got {self.initial!r}."
            )

    @property
    def interval(self) -> tuple[float, float]:
        """The bounds of uniform initial values; zeros below those of a function."""
        if callable(self.initial):
            return 0.0, 0.0
        if isinstance(self.initial, tuple):
            low, high = self.initial
            return float(low), float(high)
        bound = 1 / math.sqrt(self.rows) if self.initial is None else float(self.initial)
        return -bound, bound

    def described(self) -> dict[str, Any]:
        """All settings as plain values, which ranks can compare."""
        initial = getattr(self.initial, "__qualname__", type(self.initial).__name__)
        return {
            **{name: getattr(self, name) for name in ("name", "rows", "dim", "pooling")},
            "dtype": str(self.dtype),
            "initial": initial if callable(self.initial) else self.interval,
            "features": list(self.features),
        }


def check_tables(tables: Sequence[EmbeddingTable]) -> None:
    """Refuse tables that cannot be in one module (ValueError): other dims or dtypes, or a name
    twice.
    """
    names = [table.name for table in tables]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"The table name {twice[0]!r} occurs twice: give each table a name of its own."
        )
    for setting in ("dim", "dtype"):
        found = {getattr(table, setting): table.name for table in tables}
        if len(found) > 1:
            (one, first), (other, second), *_ = found.items()
            raise ValueError(
                f"Table {first!r} has {setting}={one} and table {second!r} has {setting}={other}:"
                f" the tables of a module share one. Make a module for each {setting}, as"
                " `lightning_dct.torchrec` does."
            )


def described_tables(
    tables: Sequence[Any],
    embedding_dim: int | None,
    pooling: Pooling | None,
    initial_bound: float | None,
) -> list[EmbeddingTable]:
    """Check tables as the constructor takes them, and describe each."""
    if not isinstance(tables, Sequence):
        raise TypeError(
            "`tables` must list the number of rows of each table, or `EmbeddingTable`s; got"
            f" {tables!r}."
        )
    if not tables:
        raise ValueError(
            "`tables` is empty: give the number of rows of each table, or `EmbeddingTable`s."
        )
    if all(isinstance(table, EmbeddingTable) for table in tables):
        given = {"embedding_dim": embedding_dim, "pooling": pooling, "initial_bound": initial_bound}
        for setting in (name for name, value in given.items() if value is not None):
            raise TypeError(f"Leave `{setting}` out: each `EmbeddingTable` says its own.")
        check_tables(tables)
        return list(tables)
    for number, rows in enumerate(tables):
        check_integer(f"tables[{number}]", rows, minimum=1)
    if initial_bound is not None and not 0 <= initial_bound < math.inf:
        raise ValueError(f"`initial_bound` must be a number of at least 0; got {initial_bound!r}.")
    check_integer("embedding_dim", embedding_dim, minimum=1)
    check_choice("pooling", pooling or "sum", POOLINGS)
    assert embedding_dim is not None
    return [
        EmbeddingTable(
            str(number), int(rows), embedding_dim, pooling or "sum", initial=initial_bound
        )
        for number, rows in enumerate(tables)
    ]


def fill_rows(table: EmbeddingTable, seed: int, number: int, start: int, rows: Tensor) -> None:
    """Write the rows of a table from ``start`` on as its function ``initial`` makes them into
    ``rows``, ``[n, dim]``.

    The function sees whole parts of the table, each with a generator seeded by ``seed``, the
    table's ``number`` and the part, so every cut of the table gives the same rows.
    """
    assert callable(table.initial)
    end = start + len(rows)
    for first in range(start - start % ROWS_AT_A_TIME, end, ROWS_AT_A_TIME):
        last = min(first + ROWS_AT_A_TIME, table.rows)
        part = torch.zeros(last - first, table.dim, dtype=torch.float32)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(
                int(np.random.SeedSequence([seed % 2**64, number, first]).generate_state(1)[0])
            )
            table.initial(part)
        low = max(first, start)
        high = min(last, end)
        rows[low - start : high - start] = part[low - first : high - first].to(rows)
