"""Sharded tables, all ranks in one process: whole tables, and `lightning_dct.reference` for what
crosses between ranks.

Nothing else is shared with the package but the placement (who owns which row) and the coded form of
whole rows: no caches, no messages, no bytes.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dct.embedding.messages import decode_whole, encode_whole
from lightning_dct.embedding.owners import RowOwners, initial_rows
from lightning_dct.reference import Settings, look_up, return_gradients


def first_rows(table_rows: list[int], dim: int, seed: int) -> list[Tensor]:
    """The initial tables."""
    bounds = np.array([1 / math.sqrt(rows) for rows in table_rows], dtype=np.float32)
    return [
        initial_rows(seed, np.full(rows, table), np.arange(rows), bounds, dim)
        for table, rows in enumerate(table_rows)
    ]


def bags_of(ids: Tensor, offsets: Tensor | None, num_tables: int) -> list[list[list[int]]]:
    """The ids of each sample's bag of each table: ``[sample][table]``."""
    if offsets is None:
        return [[[int(i)] for i in sample] for sample in ids]
    samples = (len(offsets) - 1) // num_tables
    return [
        [
            ids[
                int(offsets[table * samples + sample]) : int(offsets[table * samples + sample + 1])
            ].tolist()
            for table in range(num_tables)
        ]
        for sample in range(samples)
    ]


class Emulation:
    """All ranks at once, for the ids whose rows ``tables`` hold."""

    def __init__(
        self, tables: list[Tensor], ids: list[np.ndarray], placement: RowOwners, settings: Settings
    ) -> None:
        self.tables = tables
        self.dim = tables[0].shape[1]
        self.settings = settings
        located = [
            placement.locate(np.full(len(known), table), known) for table, known in enumerate(ids)
        ]
        self.owners = [owner for owner, _ in located]
        self.keys = [keys for _, keys in located]
        self.world = range(placement.world_size)
        self.copies = [[table.clone() for table in tables] for _ in self.world]
        self.residuals = [[torch.zeros_like(table) for table in self.tables] for _ in self.world]
        self.thresholds: dict[Any, list[float]] = {}
        self.seen: set[tuple[int, int, int]] = set()  # users, with tables and rows that they have

    def forward(self, step: int, bags: dict[int, list], pooling: str) -> dict[int, Tensor]:
        """Bring every rank's copies up to date and pool: ``[samples, tables, dim]`` a rank."""
        if step % self.settings.refresh_every == 0:
            self.thresholds = defaultdict(lambda: [0.0] * len(self.tables))
        pooled = {}
        for user, samples in bags.items():
            for owner in self.world:
                asked = self._asked(owner, samples)
                if user != owner:
                    self._come_whole(user, asked)
                new, _ = self._cross(look_up, user, owner, asked, self.tables, self.copies[user])
                for (table, rows), part in zip(asked.items(), new, strict=True):
                    own = self.tables[table][rows]
                    self.copies[user][table][rows] = (
                        own if owner == user else part.view(-1, self.dim)
                    )
            out = torch.zeros(len(samples), len(self.tables), self.dim)
            for index, sample in enumerate(samples):
                for table, rows in enumerate(sample):
                    for row in rows:
                        out[index, table] += self.copies[user][table][row]
                    if pooling == "mean" and rows:
                        out[index, table] /= len(rows)
            pooled[user] = out
        return pooled

    def _come_whole(self, user: int, asked: dict[int, list[int]]) -> None:
        """Add to a user's copies all that rows which it asks for the first time have moved."""
        new = [
            (t, row) for t, rows in asked.items() for row in rows if (user, t, row) not in self.seen
        ]
        self.seen |= {(user, *row) for row in new}
        moved = [
            (t, row)
            for t, row in new
            if not torch.equal(self.tables[t][row], self.copies[user][t][row])
        ]
        if moved:
            form = self.settings.value_format
            rows = torch.stack(
                [self.tables[t][row] - self.copies[user][t][row] for t, row in moved]
            )
            for (t, row), read in zip(
                moved,
                decode_whole(encode_whole(rows, form), len(rows), self.dim, form),
                strict=True,
            ):
                self.copies[user][t][row] += read

    def backward(
        self, bags: dict[int, list], gradients: dict[int, Tensor], pooling: str
    ) -> list[Tensor]:
        """The dense gradient of every table from those of the pooled bags: an owner's own part
        comes first.
        """
        total = [torch.zeros_like(table) for table in self.tables]
        for owner in self.world:
            for user in sorted(self.world, key=lambda user: user != owner):
                by_row = [torch.zeros_like(table) for table in self.tables]
                for sample, pulls in zip(bags[user], gradients[user], strict=True):
                    for table, rows in enumerate(sample):
                        for row in rows:
                            by_row[table][row] += pulls[table] / (
                                len(rows) if pooling == "mean" else 1
                            )
                asked = self._asked(owner, bags[user])
                if user == owner:
                    for table, rows in asked.items():
                        total[table][rows] += by_row[table][rows]
                    continue
                sent, left = self._cross(
                    return_gradients, user, owner, asked, by_row, self.residuals[user]
                )
                for (table, rows), part, rest in zip(asked.items(), sent, left, strict=True):
                    total[table][rows] += part.view(-1, self.dim)
                    self.residuals[user][table][rows] = rest.view(-1, self.dim)
        return [gradient / len(self.world) for gradient in total]

    def _asked(self, owner: int, samples: list) -> dict[int, list[int]]:
        """The distinct rows a rank asks an owner for, by table and ascending."""
        asked: dict[int, list[int]] = defaultdict(list)
        for table, row in sorted(
            {(t, row) for sample in samples for t, rows in enumerate(sample) for row in rows}
        ):
            if self.owners[table][row] == owner:
                asked[table].append(row)
        return asked

    def _cross(
        self,
        function: Callable,
        user: int,
        owner: int,
        asked: dict[int, list[int]],
        one: list,
        other: list,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What a function of the reference gives for some rows; and the second of its arguments,
        perhaps changed.
        """
        thresholds = self.thresholds[function, user, owner]
        used = [thresholds[table] for table in asked]
        parts = [
            [tables[table][rows].flatten() for table, rows in asked.items()]
            for tables in (one, other)
        ]
        given = function(*parts, used, self.settings)
        for table, threshold in zip(asked, used, strict=True):
            thresholds[table] = threshold
        return given, parts[1]
