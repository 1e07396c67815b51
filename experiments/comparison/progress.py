"""How far a comparison has come: on a terminal as a bar that moves, in a log as a line for each run."""

from __future__ import annotations

import time
from types import TracebackType

from rich import progress
from rich.console import Console
from rich.markup import escape
from rich.text import Text


def seconds_left(durations: list[float], runs_left: int, elapsed: float) -> float | None:
    """Guess how long the rest takes: as long as the mean of those done so far, each.

    Args:
        durations: Seconds that each run has taken.
        runs_left: How many are to do, the one under way included.
        elapsed: Seconds since that one started.

    Returns:
        Seconds; None while nothing is known.

    Example:
        >>> seconds_left([50.0, 70.0], runs_left=3, elapsed=45.0)
        135.0
    """
    if not durations:
        return None
    mean = sum(durations) / len(durations)
    return runs_left * mean - min(elapsed, mean)


class Progress:
    """A bar over all runs, with the one under way and the time left.

    Args:
        console: Where it is shown.
        total: How many runs there are.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._durations: list[float] = []
        self._started: float | None = None
        self._bar = progress.Progress(
            progress.SpinnerColumn(),
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.description}", markup=False),
            _TimeLeft(self),
            console=console,
            # The last line a comparison leaves is its result, not a full bar.
            transient=True,
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    @property
    def seconds_left(self) -> float | None:
        """A guess of how long the rest takes; None while nothing is known."""
        task = self._bar.tasks[0]
        elapsed = 0.0 if self._started is None else time.monotonic() - self._started
        return seconds_left(self._durations, int((task.total or 0) - task.completed), elapsed)

    def starting(self, name: str) -> None:
        """A run begins."""
        self._started = time.monotonic()
        self._bar.update(self._task, description=name)
        self._say(f"running  {name}" + (f" ({minutes(self.seconds_left)} left)" if self._durations else ""))

    def finished(self, name: str, seconds: float) -> None:
        """It has ended well."""
        self._durations.append(seconds)
        self._next(f"done     {name}, in {minutes(seconds)}")

    def found(self, name: str) -> None:
        """A run was there already."""
        self._next(f"found    {name}")

    def passed(self, name: str) -> None:
        """A run is not there, and shall not be done."""
        self._next(f"missing  {name}")

    def failed(self, reason: str, count: int = 1) -> None:
        """A run has failed; or for the same reason several cannot be done."""
        self._next(f"failed   {reason}", "red", count)

    def _next(self, line: str, style: str | None = None, count: int = 1) -> None:
        self._started = None
        self._bar.advance(self._task, count)
        self._say(line, style)

    def _say(self, line: str, style: str | None = None) -> None:
        self._bar.console.print(escape(line), style=style, highlight=False, soft_wrap=True)


class _TimeLeft(progress.ProgressColumn):
    def __init__(self, owner: Progress) -> None:
        super().__init__()
        self._owner = owner

    def render(self, task: progress.Task) -> Text:
        left = self._owner.seconds_left
        return Text("" if left is None else f"{minutes(left)} left", style="progress.remaining")


def minutes(seconds: float | None) -> str:
    """A duration for people.

    Example:
        >>> minutes(42.3), minutes(605), minutes(7300)
        ('42 s', '10 min', '2 h 2 min')
    """
    if seconds is None:
        return "-"
    if seconds < 100:
        return f"{seconds:.0f} s"
    whole = round(seconds / 60)
    return f"{whole} min" if whole < 100 else f"{whole // 60} h {whole % 60} min"
