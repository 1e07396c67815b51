"""One progress bar a stage, with rows a second and the time left."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


class StageProgress:
    """Shows how far the stages of a long job are; use it as a context manager.

    Args:
        console: Where to; nothing is shown where it is quiet.
    """

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description:>7}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=console.quiet,
        )

    def __enter__(self) -> StageProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def stage(self, name: str, total: int, completed: int) -> Callable[[int, float], None]:
        """Begin a stage.

        Args:
            name: What to call it.
            total: Its size in any unit.
            completed: How much of that an earlier run has done.

        Returns:
            A function to call with how much is completed, and how many more rows those were.
        """
        task = self._progress.add_task(name, total=total, completed=completed, rate="")
        started, rows_done = time.perf_counter(), 0.0

        def advance(completed: int, rows: float) -> None:
            nonlocal rows_done
            rows_done += rows
            rate = rows_done / max(time.perf_counter() - started, 1e-9)
            self._progress.update(task, completed=completed, rate=f"{rate:,.0f} rows/s")

        return advance
