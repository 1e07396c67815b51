"""Forecasts bytes, time and memory of every exchange, and the choice of ``exchange="auto"``, and
prints them.

Bytes follow from the plans alone. The modules in :mod:`lightning_dct.exchange` draw the collectives
of each exchange; :mod:`lightning_dct.exchange.collectives` counts the same bytes when they are
sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_dct.compress.bucket_plan import Plans, real_dtype, real_numel
from lightning_dct.config import DCTConfig
from lightning_dct.cost.timing import Speed
from lightning_dct.cost.workload import Workload
from lightning_dct.exchange.compressed import link_traversals
from lightning_dct.exchange.factory import (
    INSIDE_IS_FASTER,
    ExchangeChoice,
    NodeLayout,
    choose_for_model,
    share_model,
)
from lightning_dct.exchange.sharding import Shard, cut
from lightning_dct.traffic import (
    FP32_BYTES,
    TAG_BYTES,
    all_gather_bytes,
    all_reduce_bytes,
    bytes_between_nodes,
    format_bytes,
    plain_table,
    rate_text,
)

DENSE = "ddp"
MOST_RANKS = 10_000  # of a plan, which counts the bytes of every rank


@dataclass(frozen=True)
class Step:
    """One exchange of the whole model, in the final layout of its buckets.

    If no node has several ranks, or there is one node, all bytes count as sent to other nodes.
    """

    sent: Tensor  # bytes of each rank to other nodes and inside its own, int64, shape `[ranks, 2]`
    entries: int  # of the buckets that are compressed; the others are all-reduced
    # of each rank: its own, or the shared weights, and of sums it owns; int64, shape `[ranks]`
    residual_bytes: Tensor


@dataclass(frozen=True)
class Row:
    """One exchange, or ``"ddp"`` for the dense all-reduce; its figures are of an optimizer step."""

    name: str
    step: Step  # once in `local_steps`
    local_steps: int
    ratio: float  # as it is logged, of the rank that sends most; between nodes for `hierarchical`
    link_seconds: float  # of the busiest node's link
    compressing_seconds: float  # of a rank

    @property
    def seconds(self) -> float:
        """Link and compressing, one after the other."""
        return self.link_seconds + self.compressing_seconds


@dataclass(frozen=True)
class Forecast:
    """The exchanges of a run on two ranks or more, with equally many on every node.

    ``link`` is the bits a second of each node's link, or of each rank's where all are on one node.
    ``speed`` is the cost of compressing at the settings' density and value format.
    """

    config: DCTConfig
    workload: Workload
    layout: NodeLayout
    link: float
    speed: Speed

    @cached_property
    def choice(self) -> ExchangeChoice:
        """The choice of ``exchange="auto"``."""
        return choose_for_model(self.config, self.workload.parameters, self.layout)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The dense all-reduce, and each exchange that is possible."""
        config = self.config
        layout = self.layout
        every = self.config.local_steps
        dense = dense_step(self.workload, layout)
        rows = [Row(DENSE, dense, 1, 1.0, link_seconds(dense.sent, layout, self.link), 0.0)]
        for name in ("all_gather", "two_phase", "hierarchical"):
            if name == "hierarchical" and layout.obstacle is not None:
                continue
            step = compressed_step(name, config, self.workload, layout)
            kinds = slice(0, 1 if name == "hierarchical" else 2)
            most_sent = max(1, int(step.sent[:, kinds].sum(1).max()))  # all gradients may be sparse
            ratio = int(dense.sent[0, kinds].sum()) / most_sent
            busy = link_seconds(step.sent, layout, self.link)
            compressing = self.speed.seconds(
                name, step.entries, len(layout.places), layout.ranks_per_node
            )
            rows.append(Row(name, step, every, ratio * every, busy / every, compressing / every))
        return tuple(rows)

    def row(self, name: str) -> Row:
        """The row of a name."""
        return next(row for row in self.rows if row.name == name)

    @property
    def break_even(self) -> float:
        """The rate below which the chosen exchange is faster than the dense all-reduce; infinite if
        on every link.
        """
        dense = self.row(DENSE)
        chosen = self.row(self.choice.name)
        saved = self.link * (dense.link_seconds - chosen.link_seconds)
        return (
            max(0.0, saved / chosen.compressing_seconds) if chosen.compressing_seconds else math.inf
        )


def dense_step(workload: Workload, layout: NodeLayout) -> Step:
    """The all-reduce of all gradients in fp32, the reference of ratios."""
    sent = torch.zeros(len(layout.places), 2, dtype=torch.int64)
    for bucket in workload.buckets:
        entries = sum(real_numel(workload.parameters[name]) for name in bucket)
        sent += _ring(all_reduce_bytes(FP32_BYTES * entries, len(sent)), layout)
    return Step(sent, 0, torch.zeros_like(sent[:, 0]))


def compressed_step(
    exchange: str, config: DCTConfig, workload: Workload, layout: NodeLayout
) -> Step:
    """One of the compressed exchanges of two or more ranks; ``"hierarchical"`` needs a layout
    without an obstacle.
    """
    world_size = len(layout.places)
    local = layout.ranks_per_node
    traversals = link_traversals(exchange, world_size, local)
    plans = Plans(config, traversals)
    among = {"two_phase": world_size, "hierarchical": local}.get(exchange, 0)
    pieces = share_model(config, workload.parameters, traversals, among) if among else {}
    sent = torch.zeros(world_size, 2, dtype=torch.int64)
    entries = 0
    of_updates = config.compress == "updates"
    residuals = torch.zeros(world_size, dtype=torch.int64)
    for names in workload.buckets_under(config):
        tensors = [workload.parameters[name] for name in names]
        plan = plans.of(names, [*map(real_numel, tensors)], real_dtype(tensors[0]))
        itemsize = (
            plan.residual_dtype if of_updates else plan.dtype
        ).itemsize  # of what is all-reduced
        if of_updates:
            residuals += sum(tensor.nbytes for tensor in tensors)  # the shared weights
        elif not plan.is_dense and exchange != "hierarchical":
            residuals += sum(plan.sizes) * plan.residual_dtype.itemsize
        if plan.is_dense:
            itemsize = 2 if config.averages_in_bf16 and plan.dtype == torch.float32 else itemsize
            sent += _ring(all_reduce_bytes(sum(plan.sizes) * itemsize, world_size), layout)
            sent += _ring(all_reduce_bytes(TAG_BYTES * of_updates, world_size), layout)
            continue
        entries += sum(plan.sizes)
        if exchange == "all_gather":
            sent += _ring(all_gather_bytes(plan.num_bytes, world_size), layout)
            continue
        shards = cut(plan, pieces, among).shards
        packed = [shard.packed for shard in shards]
        owned = torch.tensor([sum(one.sizes) * one.residual_dtype.itemsize for one in packed])
        if exchange == "two_phase":
            sent += _two_phase(shards, layout)
            residuals += owned
        else:  # ranks are in the order of the nodes, and each node has an owner of every shard
            # Dense inside the node, one shard's payload between nodes, then the payloads of all
            # nodes inside.
            nodes = world_size // local
            dense = all_reduce_bytes(sum(plan.sizes) * itemsize, local)
            payloads = torch.tensor([shard.packed.num_bytes for shard in shards])
            inside = dense + (local - 1) * nodes * payloads
            sent += torch.stack([(nodes - 1) * payloads, inside], dim=1).repeat(nodes, 1)
            residuals += owned.repeat(nodes)
    return Step(sent, entries, residuals)


def _ring(num_bytes: int, layout: NodeLayout) -> Tensor:
    between = bytes_between_nodes(num_bytes, len(layout.places), layout.ranks_per_node)
    return torch.tensor([between, num_bytes - between])


def _two_phase(shards: Sequence[Shard], layout: NodeLayout) -> Tensor:
    """Each rank sends each owner its part, and then all ranks the compressed sums that it owns."""
    local = layout.ranks_per_node
    owned = torch.tensor([shard.plan.num_bytes for shard in shards])
    sums = torch.tensor([shard.sums.num_bytes for shard in shards])
    on_node = owned.view(-1, local).sum(1).repeat_interleave(local)
    between = owned.sum() - on_node + (len(shards) - local) * sums
    return torch.stack([between, on_node - owned + (local - 1) * sums], dim=1)


def layout_of(world_size: int, nodes: int) -> NodeLayout:
    """Ranks spread evenly over nodes, in their order; a ValueError for impossible numbers."""
    if world_size < 2:
        raise ValueError(
            f"`--world-size {world_size}`: a single rank exchanges nothing. Give 2 or more"
        )
    if world_size > MOST_RANKS:
        raise ValueError(
            f"`--world-size {world_size}`: plans are made for {MOST_RANKS:,} ranks at most"
        )
    if nodes < 1 or world_size % nodes:
        possible = [str(count) for count in range(1, world_size + 1) if world_size % count == 0]
        raise ValueError(
            f"`--nodes {nodes}` does not divide `--world-size {world_size}`: every node must have"
            f" the same number of ranks. Give {', '.join(possible[:-1])} or {possible[-1]}"
        )
    return NodeLayout(tuple(divmod(rank, world_size // nodes) for rank in range(world_size)))


def link_seconds(sent: Tensor, layout: NodeLayout, link: float) -> float:
    """The seconds for which the busiest node's link is busy with what ranks send, inside that node
    included.

    The ranks of a node share its link. Like ``exchange="auto"``, this assumes that bytes inside a
    node move faster.
    """
    cost = sent[:, 0] + sent[:, 1].double() / INSIDE_IS_FASTER
    return 8 * float(cost.view(-1, layout.ranks_per_node).sum(1).max()) / link


def describe(forecast: Forecast, more: Sequence[str]) -> str:
    """The title, the table and the notes, with some more."""
    config = forecast.config
    layout = forecast.layout
    sizes = forecast.workload.sizes_under(config)
    every = "step" if config.local_steps == 1 else f"{config.local_steps:,} steps"
    exchanged = "gradients" if config.compress == "gradients" else f"updates every {every}"
    title = (
        f"{_many(sum(sizes), 'parameter')} in {_many(len(sizes), 'tensor')},"
        f" {100 * config.density:g}% of the entries, {config.value_format} values, {exchanged};"
        f" {_many(len(layout.places), 'rank')} on {_many(len(layout.nodes), 'node')},"
        f" {rate_text(forecast.link)} from each {'rank' if len(layout.nodes) == 1 else 'node'}"
    )
    notes = "\n".join(f"- {note}" for note in [*_notes(forecast), *more])
    return f"{title}\n\n{plain_table(_table(forecast))}\n\n{notes}"


def _table(forecast: Forecast) -> list[list[str]]:
    names = {DENSE: "ddp, fp32", forecast.choice.name: f"{forecast.choice.name} (auto)"}
    sent = [int(row.step.sent.sum(1).max()) // row.local_steps for row in forecast.rows]
    rows = [
        ["a step", *(names.get(row.name, row.name) for row in forecast.rows)],
        ["bytes a step and rank", *(f"{most:,}" for most in sent)],
        ["compression ratio", *(f"{row.ratio:,.1f}x" for row in forecast.rows)],
        ["ms on the link", *(f"{1e3 * row.link_seconds:,.1f}" for row in forecast.rows)],
        ["ms compressing", *(f"{1e3 * row.compressing_seconds:,.1f}" for row in forecast.rows)],
        ["ms together", *(f"{1e3 * row.seconds:,.1f}" for row in forecast.rows)],
        [
            "extra memory on a rank",
            *(format_bytes(int(row.step.residual_bytes.max())) for row in forecast.rows),
        ],
    ]
    if any(buffers := forecast.workload.buffers):
        each = all_reduce_bytes(buffers[0], len(forecast.layout.places)) + buffers[1]
        updates = forecast.config.compress == "updates"
        most = (
            each // row.local_steps if updates and row.name != DENSE else sum(buffers)
            for row in forecast.rows
        )
        rows.append(["bytes of buffers, at most", *(f"{num_bytes:,}" for num_bytes in most)])
    if forecast.layout.ranks_per_node > 1:
        between = (int(row.step.sent[:, 0].max()) // row.local_steps for row in forecast.rows)
        rows.insert(2, ["of them to other nodes", *(f"{num_bytes:,}" for num_bytes in between)])
    return rows


def _notes(forecast: Forecast) -> list[str]:
    chosen = forecast.row(forecast.choice.name)
    dense = forecast.row(DENSE)
    notes = [f'exchange="auto" takes {chosen.name!r}: {forecast.choice.reason}.']
    if forecast.workload.sparse and forecast.config.compress == "updates":
        notes.append(
            "The dense column leaves out embeddings with sparse gradients, and the others have"
            " them. So compare a run with both strategies."
        )
    elif chosen.seconds < dense.seconds:
        notes.append(
            f"Synchronising takes {1e3 * chosen.seconds:,.1f} ms a step instead of"
            f" {1e3 * dense.seconds:,.1f}, if backward hides none of it. These figures do not"
            " include a round trip's latency."
        )
    elif not chosen.step.entries:
        notes.append(
            "Nothing is compressed, and it sends no less than the dense all-reduce: use"
            " strategy='ddp'."
        )
    else:
        notes.append(
            f"On this link the dense all-reduce is faster ({1e3 * dense.seconds:,.1f} ms a step,"
            f" against {1e3 * chosen.seconds:,.1f}): use strategy='ddp'. Compressing pays on links"
            f" below about {rate_text(forecast.break_even, digits=2)}."
        )
    notes.append(f"Compressing: {forecast.speed.measurement}.")
    if forecast.layout.ranks_per_node > 1:
        notes.append(
            "The ranks of a node share its link. Like `auto`, this assumes that bytes inside a"
            f" node move {INSIDE_IS_FASTER} times as fast as a rank's share of it. Only with"
            " 'hierarchical' does a run count bytes between nodes and inside nodes separately. Its"
            " ratio is then that of the bytes between nodes."
        )
    if any(forecast.workload.buffers):
        notes.append(
            "Buffers come on top of bytes, ratio and times. `ddp` sends all of them in every step."
            " Exchanges of updates send those that differ between ranks, such as running"
            " statistics, and none that stay as they are."
        )
    skipped = forecast.workload.not_counted.items()
    return notes + [f"Not counted: {count:,} parameters, because {why}." for why, count in skipped]


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
