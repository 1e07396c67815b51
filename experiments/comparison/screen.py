"""A comparison on the screen: a row a strategy where it is wide enough, else a column a strategy."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from comparison.runs import Entry
from comparison.table import how_to_read, sweep_notes, tabulate

# Of a column: a line and a blank on either side.
_BORDER = 3


def show(console: Console, entries: Sequence[Entry], title: str) -> None:
    """Print the table of a comparison and what it takes to read it.

    Args:
        console: Where it is printed.
        entries: The sides of the comparison, the baseline first.
        title: What was compared.
    """
    heads, rows = tabulate(entries)
    if _width(heads, rows) > console.width:
        labels, *figures = zip(*rows, strict=True)
        rows = [[head, *cells] for head, cells in zip(heads[1:], figures, strict=True)]
        heads = ["", *labels]
    table = Table()
    for place, width in enumerate(_column_widths(heads, rows)):
        table.add_column(escape(heads[place]), justify="right" if place else "left", min_width=width)
    for row in rows:
        table.add_row(*map(escape, row))
    table.title, table.caption = escape(title), escape(how_to_read(entries))
    console.print(table)
    for note in sweep_notes(entries):
        console.print(note, markup=False, highlight=False)


def _width(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """The least width of a table in which no word and no figure is broken."""
    return sum(width + _BORDER for width in _column_widths(heads, rows)) + 1


def _column_widths(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Figures stay in one piece; heads, and what stands before the figures, may break at blanks."""
    labels, *figures = zip(*rows, strict=True)
    cells = [[word for label in labels for word in label.split()], *figures]
    return [max(map(len, [*head.split(), *column])) for head, column in zip(heads, cells, strict=True)]
