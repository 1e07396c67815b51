"""A forecast as a table and sentences, with rich where it is installed."""

from __future__ import annotations

import torch

from lightning_dct.callbacks.compression_monitor import format_bytes
from lightning_dct.forecast.bytes_sent import ranks_per_node
from lightning_dct.forecast.forecast import DENSE, Forecast, Row
from lightning_dct.forecast.quantities import rate_text
from lightning_dct.gradients.exchanges.auto import INSIDE_IS_FASTER
from lightning_dct.kernels import faster_kernel_missing


def title_of(forecast: Forecast) -> str:
    """What was reckoned, in one line."""
    tensors = sum(len(bucket) for bucket in forecast.workload.buckets)
    config = forecast.config
    return (
        f"{forecast.workload.entries:,} parameters in {_many(tensors, 'tensor')}, {100 * config.density:g}% of the"
        f" entries, {config.value_format} values; {_where(forecast)}"
    )


def table_of(forecast: Forecast) -> tuple[list[str], list[list[str]]]:
    """The heads of the columns, one for each exchange, and the rows."""
    columns = forecast.rows
    rows = [["bytes a step and rank", *(f"{row.most_sent:,}" for row in columns)]]
    if ranks_per_node(forecast.layout) > 1:
        rows.append(["of them to other nodes", *(f"{row.most_between:,}" for row in columns)])
    rows.append(["compression ratio", *(f"{row.ratio:,.1f}x" for row in columns)])
    rows.append(["ms on the link", *(_milliseconds(row.link_seconds) for row in columns)])
    rows.append(["ms compressing", *(_milliseconds(row.compressing_seconds) for row in columns)])
    rows.append(["ms together", *(_milliseconds(row.seconds) for row in columns)])
    rows.append(["residuals on a rank", *(format_bytes(row.most_held) for row in columns)])
    return ["a step", *(_name(row, forecast) for row in columns)], rows


def notes_of(forecast: Forecast) -> list[str]:
    """What is to be said beside the table."""
    chosen, dense = forecast.row(forecast.choice.name), forecast.row(DENSE)
    notes = [f'exchange="auto" takes {chosen.name!r}: {forecast.choice.reason}.']
    every = forecast.config.round_length
    seconds = chosen.seconds / every
    if every > 1:
        notes.append(
            f"What weights have moved is exchanged every {every} steps (`local_steps`): the compressed columns are"
            " those of an exchange, ddp's those of a step. Over all steps the ratio is so many times as high, for"
            f" {chosen.name!r} {every * chosen.ratio:,.0f}x."
        )
    if seconds < dense.seconds:
        notes.append(
            f"Synchronising takes {1e3 * seconds:,.1f} ms a step instead of {1e3 * dense.seconds:,.1f}, where"
            " nothing of it is hidden behind backward. A round trip's latency is not in these."
        )
    else:
        notes.append(
            f"On this link the dense all-reduce is faster ({1e3 * dense.seconds:,.1f} ms a step, against"
            f" {1e3 * seconds:,.1f}): use strategy='ddp'."
        )
    notes.append(f"Compressing: {forecast.speed.how}.")
    if not torch.cuda.is_available() and (missing := faster_kernel_missing("cpu")):
        notes.append(missing)
    if ranks_per_node(forecast.layout) > 1:
        notes.append(
            "The ranks of a node share its link; bytes inside a node are taken to move"
            f" {INSIDE_IS_FASTER} times as fast as a rank's share of it, as `auto` takes them to. A run counts bytes"
            " between and inside nodes apart with 'by_node' only, and its ratio is then that of the bytes between."
        )
    else:
        notes.append("Sizes are those that a run counts, headers and padding included, by the rank that sends most.")
    if len(forecast.workload.buckets) > 1:
        notes.append(
            f"{_many(len(forecast.workload.buckets), 'bucket')}, as DistributedDataParallel makes them from the second"
            " step on of a model that uses its parameters in the order of their definition; another order shifts the"
            " bytes by a few headers."
        )
    notes += [
        f"Not counted: {count:,} parameters, because {why}." for why, count in forecast.workload.not_counted.items()
    ]
    return notes


def print_forecast(forecast: Forecast) -> None:
    """Print it all."""
    title, (heads, rows), notes = title_of(forecast), table_of(forecast), notes_of(forecast)
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print("\n".join([title, "", *plain_table(heads, rows), "", *(f"- {note}" for note in notes)]))
        return
    console = Console(highlight=False)
    console.print(title, markup=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    styles = ["bold" if row.name == forecast.choice.name else None for row in forecast.rows]
    for head, style in zip(heads, [None, *styles], strict=True):
        table.add_column(head, justify="left" if head == heads[0] else "right", style=style, overflow="fold")
    for cells in rows:
        table.add_row(*cells)
    console.print(table)
    for note in notes:
        console.print(f"- {note}", markup=False)


def plain_table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table without rich.

    Example:
        >>> plain_table(["what", "bytes"], [["ddp", "1,000"]])
        ['what  bytes', 'ddp   1,000']
    """
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return [
        "  ".join([cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))])
        for cells in [heads, *rows]
    ]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def _name(row: Row, forecast: Forecast) -> str:
    if row.name == DENSE:
        return "ddp, fp32"
    return f"{row.name} (auto)" if row.name == forecast.choice.name else row.name


def _where(forecast: Forecast) -> str:
    ranks, nodes = len(forecast.layout.places), len(forecast.layout.nodes)
    owner = "each rank" if nodes == 1 else "each node"
    return f"{_many(ranks, 'rank')} on {_many(nodes, 'node')}, {rate_text(forecast.link)} from {owner}"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
