"""Reads what Lightning's ``CSVLogger`` leaves: ``metrics.csv``, a column a name, and ``hparams.yaml``."""

from __future__ import annotations

import csv
from pathlib import Path

from lightning_dct.report.run import Run, Series, UnreadableRun
from lightning_dct.report.settings import read_settings

HPARAMS_FILE = "hparams.yaml"
STEP_COLUMN = "step"


def read_csv_run(file: Path) -> Run:
    """Read a run.

    Args:
        file: ``metrics.csv``.

    Raises:
        UnreadableRun: It holds no values.
    """
    series, problems = read_metrics(file)
    settings: dict[str, str] = {}
    if (hparams := file.with_name(HPARAMS_FILE)).exists():
        settings, problem = read_settings(hparams)
        problems += problem
    return Run(file.parent.name, file, "CSV log", series, settings, problems=tuple(problems))


def read_metrics(file: Path) -> tuple[dict[str, Series], list[str]]:
    """Read all columns; what cannot be read is left out and counted.

    Args:
        file: ``metrics.csv``: a header, a row a call of ``log_metrics``, empty cells where that call had no such name.

    Returns:
        The series by name, and a sentence for each kind of thing that was left out.

    Raises:
        UnreadableRun: There is no column of steps, or nothing in the others.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    malformed = _Count(file, "malformed line", "malformed lines")
    no_numbers = _Count(file, "value that is no number", "values that are no numbers")
    with file.open(newline="", encoding="utf-8", errors="replace") as lines:
        reader = csv.reader(lines)
        header = next(reader, [])
        if STEP_COLUMN not in header:
            raise UnreadableRun(f"{file}: no column '{STEP_COLUMN}' in its first line")
        at = header.index(STEP_COLUMN)
        while True:
            try:
                row = next(reader)
            except StopIteration:
                break
            except csv.Error as error:
                malformed.add(reader.line_num, str(error))
                continue
            if not row:
                continue
            if len(row) != len(header):
                malformed.add(reader.line_num, f"{len(row)} fields instead of {len(header)}")
                continue
            try:
                step = int(float(row[at]))
            except (ValueError, OverflowError):
                malformed.add(reader.line_num, f"step '{row[at]}'")
                continue
            for name, cell in zip(header, row, strict=True):
                if not cell or name == STEP_COLUMN:
                    continue
                try:
                    points.setdefault(name, []).append((step, float(cell)))
                except ValueError:
                    no_numbers.add(reader.line_num, f"{name}='{cell}'")
    points = {name: found for name, found in points.items() if found}
    if not points:
        raise UnreadableRun(f"{file}: no values in it ({malformed.count} malformed lines)")
    series = {name: Series.of(found) for name, found in points.items()}
    return series, [str(count) for count in (malformed, no_numbers) if count.count]


class _Count:
    """How often something was wrong, and where first."""

    def __init__(self, file: Path, one: str, several: str) -> None:
        self.count = 0
        self._file, self._one, self._several = file, one, several
        self._first = ""

    def add(self, line: int, why: str) -> None:
        """Count one.

        Args:
            line: Its number, from 1.
            why: What is wrong with it.
        """
        self.count += 1
        self._first = self._first or f"line {line}: {why}"

    def __str__(self) -> str:
        if self.count == 1:
            return f"{self._file}: 1 {self._one} left out, {self._first}"
        return f"{self._file}: {self.count:,} {self._several} left out, the first in {self._first}"
