"""Writes made-up lines in the format of Criteo's Kaggle file: ``python experiments/dlrm/criteo_sample.py 9999 FILE``.

The rows are those of ``data=synthetic_clicks``'s teacher, at Criteo's 26 cardinalities and with its columns that go
missing together, so that preparing and training can be tried and timed where the real file is not at hand.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # experiments/, where `dlrm` is

import numpy as np

from counter_random import hash_counters, uniform
from dlrm.criteo_lines import NUM_CATEGORIES
from dlrm.data import ClickTeacher

# fmt: off
TABLE_ROWS = [
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
]
# fmt: on
"""Values of each category in Criteo's Kaggle file, the missing one included."""

_CHUNK_ROWS = 10_000
_MISSING_TOGETHER = (18, 19, 24, 25)
_MISSING_RATE = 0.44
_VALUE, _GONE = 100, 101  # Uses of hashed numbers that the teacher does not have.


def make_lines(start: int, stop: int, teacher: ClickTeacher) -> bytes:
    """Make rows ``start`` to ``stop`` of the endless made-up file; each is a pure function of its number."""
    numbers = np.arange(start, stop)
    batch = teacher.batch(numbers)
    counts = np.round(np.expm1(batch["dense"].numpy())).astype(np.int64)
    ids = batch["categorical"].numpy()
    values = hash_counters(teacher.seed, _VALUE, np.arange(NUM_CATEGORIES), ids) & np.uint64(0xFFFF_FFFF)
    gone = uniform(hash_counters(teacher.seed, _GONE, numbers)) < _MISSING_RATE
    lines = []
    for label, row_counts, row_ids, row_values, is_gone in zip(
        batch["label"].numpy().astype(int).tolist(),
        counts.tolist(),
        ids.tolist(),
        values.tolist(),
        gone.tolist(),
        strict=True,
    ):
        categories = [f"{value:08x}" if key else "" for key, value in zip(row_ids, row_values, strict=True)]
        if is_gone:
            for column in _MISSING_TOGETHER:
                categories[column] = ""
        integers = [str(count) if count else "" for count in row_counts]
        # I2 counts from -2 on.
        integers[1] = str(row_counts[1] - 2)
        lines.append("\t".join([str(label), *integers, *categories]))
    return ("\n".join(lines) + "\n").encode()


def write_sample(file: Path, rows: int, seed: int = 0) -> None:
    """Write a file with this many rows."""
    teacher = ClickTeacher(TABLE_ROWS, seed)
    with file.open("wb") as lines:
        for start in range(0, rows, _CHUNK_ROWS):
            lines.write(make_lines(start, min(rows, start + _CHUNK_ROWS), teacher))


def main() -> None:
    """Write a file from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rows", type=int)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_sample(arguments.file, arguments.rows, arguments.seed)


if __name__ == "__main__":
    main()
