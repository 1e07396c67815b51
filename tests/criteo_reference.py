"""Criteo's format the plain way, one line at a time: what the tests of the fast way compare with; and made-up lines."""

import math
from collections import Counter
from typing import Any

import numpy as np


def make_lines(rows: int, seed: int = 0, values: int = 40) -> list[bytes]:
    """Make lines with a skewed choice of ``values`` values a category, some of each missing, and negative integers."""
    random = np.random.default_rng(seed)
    lines = []
    for _ in range(rows):
        integers = [str(int(n)) if n > -3 else "" for n in random.geometric(0.05, 13) - 4]
        ids = (values * random.random(26) ** 3).astype(int)
        categories = [f"{i * 2654435761 % 2**32:08x}" if i else "" for i in ids]
        lines.append("\t".join([str(random.integers(2)), *integers, *categories]).encode())
    return lines


def read_row(line: bytes) -> tuple[int, list[int], list[int | None]]:
    """Read a good line: label, integers with missing ones 0, categories with missing ones None."""
    fields = line.decode().split("\t")
    fields += [""] * (40 - len(fields))
    return (
        int(fields[0]),
        [int(text or "0") for text in fields[1:14]],
        [int(text, 16) if text else None for text in fields[14:]],
    )


def prepare_rows(
    lines: list[bytes], days: int = 7, min_count: int = 10, max_rows: int | None = None
) -> tuple[dict[str, np.ndarray], list[int]]:
    """Prepare good lines: label, dense and categorical as they shall come out, and the rows of each table."""
    rows = [read_row(line) for line in lines]
    training = rows[: len(rows) - len(rows) // days]
    ids: list[dict[Any, int]] = []
    for category in range(26):
        counts = Counter(row[2][category] for row in training)
        del counts[None]
        kept = sorted((value for value in counts if counts[value] >= min_count), key=lambda v: (-counts[v], v))
        kept = kept[: None if max_rows is None else max_rows - 2]
        ids.append({None: 0, **{value: 2 + place for place, value in enumerate(kept)}})
    prepared = {
        "label": np.array([row[0] for row in rows], dtype=np.float32),
        "dense": np.array([[math.log1p(max(0, n)) for n in row[1]] for row in rows], dtype=np.float32),
        "categorical": np.array([[ids[c].get(value, 1) for c, value in enumerate(row[2])] for row in rows]),
    }
    return prepared, [len(table) + 1 for table in ids]
