"""A forecast as a table and sentences."""

from collections.abc import Sequence

import torch

from lightning_dct.cost.forecast import DENSE, Forecast
from lightning_dct.exchange.factory import INSIDE_IS_FASTER
from lightning_dct.kernels import faster_kernel_missing
from lightning_dct.tables import format_bytes, plain_table, rate_text


def describe(forecast: Forecast, more: Sequence[str] = ()) -> str:
    """The title, the table and the notes, with some more."""
    notes = "\n".join(f"- {note}" for note in [*_notes(forecast), *more])
    return f"{_title(forecast)}\n\n{plain_table(_table(forecast))}\n\n{notes}"


def _title(forecast: Forecast) -> str:
    config, layout = forecast.config, forecast.layout
    every = "step" if config.round_length == 1 else f"{config.round_length:,} steps"
    what = "gradients" if config.compress == "gradients" else f"updates every {every}"
    replicas = "" if forecast.shards is None else f" in replicas of {_many(forecast.shards, 'shard')}"
    return (
        f"{forecast.workload.entries:,} parameters in {_many(sum(map(len, forecast.workload.buckets)), 'tensor')},"
        f" {100 * config.density:g}% of the entries, {config.value_format} values, {what};"
        f" {_many(len(layout.places), 'rank')}{replicas} on {_many(len(layout.nodes), 'node')},"
        f" {rate_text(forecast.link)} from each {'rank' if len(layout.nodes) == 1 else 'node'}"
    )


def _table(forecast: Forecast) -> list[list[str]]:
    dense = "ddp, fp32" if forecast.shards is None else "hsdp, fp32"
    names = {DENSE: dense, forecast.choice.name: f"{forecast.choice.name} (auto)"}
    columns = forecast.rows
    rows = [
        ["a step", *(names.get(row.name, row.name) for row in columns)],
        ["bytes a step and rank", *(f"{row.most_sent:,}" for row in columns)],
        ["compression ratio", *(f"{row.ratio:,.1f}x" for row in columns)],
        ["ms on the link", *(f"{1e3 * row.link_seconds:,.1f}" for row in columns)],
        ["ms compressing", *(f"{1e3 * row.compressing_seconds:,.1f}" for row in columns)],
        ["ms together", *(f"{1e3 * row.seconds:,.1f}" for row in columns)],
        ["residuals on a rank", *(format_bytes(max(row.step.residual_bytes)) for row in columns)],
    ]
    if forecast.layout.ranks_per_node > 1 or forecast.shards is not None:
        where = "to other nodes" if len(forecast.layout.nodes) > 1 else "between replicas"
        rows.insert(2, [f"of them {where}", *(f"{row.most_between:,}" for row in columns)])
    return rows


def _notes(forecast: Forecast) -> list[str]:
    chosen, dense = forecast.row(forecast.choice.name), forecast.row(DENSE)
    rival = "strategy='ddp'" if forecast.shards is None else "HSDP"
    notes = [f'exchange="auto" takes {chosen.name!r}: {forecast.choice.reason}.']
    if chosen.seconds < dense.seconds:
        notes.append(
            f"Synchronising takes {1e3 * chosen.seconds:,.1f} ms a step instead of {1e3 * dense.seconds:,.1f}, if"
            " backward hides none of it. These figures do not include a round trip's latency."
        )
    elif chosen.most_sent == dense.most_sent:
        notes.append(f"It sends as much as the dense all-reduce, so nothing is compressed: use {rival}.")
    else:
        notes.append(
            f"On this link the dense all-reduce is faster ({1e3 * dense.seconds:,.1f} ms a step, against"
            f" {1e3 * chosen.seconds:,.1f}): use {rival}."
        )
    notes.append(f"Compressing: {forecast.speed.how}.")
    if not torch.cuda.is_available() and (missing := faster_kernel_missing("cpu")):
        notes.append(missing)
    if forecast.shards is not None:
        notes.append(
            "Sizes are those that a run counts, of the rank that sends most: shards may differ. The ratio leaves out"
            " FSDP's own bytes: two gatherings of the weights and one reduction of the gradients in fp32."
        )
    elif forecast.layout.ranks_per_node > 1:
        notes.append(
            "The ranks of a node share its link. Like `auto`, this assumes that bytes inside a node move"
            f" {INSIDE_IS_FASTER} times as fast as a rank's share of it. Only with 'by_node' does a run"
            " count bytes between nodes and inside nodes separately. Its ratio is then that of the bytes between nodes."
        )
    else:
        notes.append("Sizes are those that a run counts, headers and padding included, by the rank that sends most.")
    if len(forecast.workload.buckets) > 1 and forecast.shards is None:
        notes.append(
            f"{_many(len(forecast.workload.buckets), 'bucket')}, as DistributedDataParallel makes them from the second"
            " step on if the model uses its parameters in the order of their definition. Another order shifts the"
            " bytes by a few headers."
        )
    skipped = forecast.workload.not_counted.items()
    return notes + [f"Not counted: {count:,} parameters, because {why}." for why, count in skipped]


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
