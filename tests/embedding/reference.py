"""Sharded tables in the plainest way: whole tables in one process, every rank and every pair of ranks emulated.

Nothing here is shared with the package but the placement (who owns which row), the threshold's selection and the
rounding of values; there are no caches, no messages, no bytes.
"""

import math
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from lightning_dct.embedding.initial import initial_rows
from lightning_dct.embedding.placement import Placement
from lightning_dct.threshold import kth_magnitude
from lightning_dct.wire import decode_values, encode_values


def first_rows(table_rows: list[int], dim: int, seed: int) -> list[Tensor]:
    """The initial tables."""
    bounds = np.array([1 / math.sqrt(rows) for rows in table_rows], dtype=np.float32)
    return [
        initial_rows(seed, np.full(rows, table), np.arange(rows), bounds, dim) for table, rows in enumerate(table_rows)
    ]


def bags_of(ids: Tensor, offsets: Tensor | None, num_tables: int) -> list[list[list[int]]]:
    """The ids of each sample's bag of each table: ``[sample][table]``."""
    if offsets is None:
        return [[[int(i)] for i in sample] for sample in ids]
    samples = (len(offsets) - 1) // num_tables
    return [
        [
            ids[int(offsets[table * samples + sample]) : int(offsets[table * samples + sample + 1])].tolist()
            for table in range(num_tables)
        ]
        for sample in range(samples)
    ]


class Emulation:
    """All ranks at once. Thresholds are selected in every step."""

    def __init__(
        self, table_rows: list[int], dim: int, placement: Placement, density: float, value_format: str, seed: int
    ) -> None:
        self.tables = first_rows(table_rows, dim, seed)
        self.dim, self.placement, self.density, self.value_format = dim, placement, density, value_format
        initial = first_rows(table_rows, dim, seed)
        world = range(placement.world_size)
        self.copies = {rank: [table.clone() for table in initial] for rank in world}
        self.residuals = {rank: [torch.zeros_like(table) for table in initial] for rank in world}

    def owner(self, table: int, row: int) -> int:
        owners, _ = self.placement.locate(np.array([table]), np.array([row]))
        return int(owners[0])

    def forward(self, bags: dict[int, list], pooling: str) -> dict[int, Tensor]:
        """Bring every rank's copies up to date and pool: ``[samples, tables, dim]`` a rank."""
        pooled = {}
        for rank, samples in bags.items():
            for owner, asked in self._asked(rank, samples).items():
                if owner == rank:
                    for table, row in asked:
                        self.copies[rank][table][row] = self.tables[table][row]
                    continue
                unknown = {key: self.tables[key[0]][key[1]] - self.copies[rank][key[0]][key[1]] for key in asked}
                for (table, row), sent in self._sent(unknown).items():
                    self.copies[rank][table][row] += sent
            out = torch.zeros(len(samples), len(self.tables), self.dim)
            for index, sample in enumerate(samples):
                for table, rows in enumerate(sample):
                    for row in rows:
                        out[index, table] += self.copies[rank][table][row]
                    if pooling == "mean" and rows:
                        out[index, table] /= len(rows)
            pooled[rank] = out
        return pooled

    def backward(self, bags: dict[int, list], gradients: dict[int, Tensor], pooling: str) -> list[Tensor]:
        """The dense gradient of every table from those of the pooled bags."""
        total = [torch.zeros_like(table) for table in self.tables]
        for rank, samples in bags.items():
            by_row: dict[tuple[int, int], Tensor] = defaultdict(lambda: torch.zeros(self.dim))
            for index, sample in enumerate(samples):
                for table, rows in enumerate(sample):
                    for row in rows:
                        share = len(rows) if pooling == "mean" else 1
                        by_row[table, row] = by_row[table, row] + gradients[rank][index, table] / share
            for owner, asked in self._asked(rank, samples).items():
                if owner == rank:
                    for table, row in asked:
                        total[table][row] += by_row[table, row]
                    continue
                held = {(table, row): self.residuals[rank][table][row] + by_row[table, row] for table, row in asked}
                for (table, row), sent in self._sent(held).items():
                    total[table][row] += sent
                    held[table, row] = held[table, row] - sent
                for (table, row), left in held.items():
                    self.residuals[rank][table][row] = left
        return [gradient / self.placement.world_size for gradient in total]

    def _asked(self, rank: int, samples: list) -> dict[int, list[tuple[int, int]]]:
        """The distinct rows a rank asks each owner for, in the order of the owner's places."""
        distinct = {(table, row) for sample in samples for table, rows in enumerate(sample) for row in rows}
        asked: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for table, row in sorted(distinct):
            asked[self.owner(table, row)].append((table, row))
        return asked

    def _sent(self, unknown: dict[tuple[int, int], Tensor]) -> dict[tuple[int, int], Tensor]:
        """What is sent of some rows, entries that are not sent zero.

        Rows of one bag get equal gradients, so many entries tie with the threshold; where that makes more than there
        is room for, those go that exceed their threshold most, the first of equals before the last.
        """
        entries, capacity = [], 0
        for table in sorted({key[0] for key in unknown}):
            flat = torch.cat([row for key, row in unknown.items() if key[0] == table])
            room = math.ceil(self.density * flat.numel())
            capacity += room
            threshold = kth_magnitude(flat, room)
            for place, value in enumerate(flat):
                if abs(float(value)) >= threshold:
                    entries.append((float(value.abs() / torch.tensor(threshold)), table, place, value))
        entries = sorted(entries, key=lambda entry: -entry[0])[:capacity]
        sent = {}
        for table in sorted({key[0] for key in unknown}):
            keys = [key for key in unknown if key[0] == table]
            chosen = sorted((place, value) for _, t, place, value in entries if t == table)
            decoded = torch.zeros(len(keys) * self.dim)
            if chosen:
                values = torch.stack([value for _, value in chosen])
                index = torch.zeros(len(chosen), dtype=torch.int64)
                data, scales = encode_values(values, index, 1, self.value_format)
                decoded[[place for place, _ in chosen]] = decode_values(
                    data, len(chosen), index, scales, self.value_format
                )
            sent.update(zip(keys, decoded.view(len(keys), self.dim), strict=True))
        return sent
