"""The forecast: bytes, time and memory of every exchange, and the choice of ``exchange="auto"``; also as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from lightning_dct.config import DCTConfig
from lightning_dct.cost.bytes_sent import (
    Group,
    SentBytes,
    Step,
    compressed_step,
    dense_step,
    fsdp_bytes,
    groups_of,
    step_of_all,
)
from lightning_dct.cost.timing import Speed
from lightning_dct.cost.workload import Workload
from lightning_dct.exchange.factory import INSIDE_IS_FASTER, ExchangeChoice, NodeLayout, choose_for_model
from lightning_dct.tables import format_bytes, plain_table, rate_text

DENSE = "ddp"
MOST_RANKS = 10_000
"""Limit of a plan, which counts the bytes of every rank."""


@dataclass(frozen=True)
class Row:
    """One exchange.

    Attributes:
        name: ``"ddp"`` for the dense all-reduce, or the exchange.
        step: The bytes of one exchange, rank by rank.
        local_steps: Optimizer steps from one exchange to the next. All other figures are of a step.
        ratio: The logged compression ratio, of the rank that sends most; between nodes for ``by_node`` and
            ``dct_fsdp``.
        link_seconds: How long the busiest node's link is busy in a step.
        compressing_seconds: How long a rank compresses in a step.
    """

    name: str
    step: Step
    local_steps: int
    ratio: float
    link_seconds: float
    compressing_seconds: float

    @property
    def seconds(self) -> float:
        """Link and compressing, one after the other."""
        return self.link_seconds + self.compressing_seconds

    @property
    def most_sent(self) -> int:
        """Bytes of the rank that sends most."""
        return max(sent.total for sent in self.step.sent) // self.local_steps


@dataclass(frozen=True)
class Forecast:
    """The exchanges of a run on two ranks or more, with equally many on every node.

    Attributes:
        config: The settings.
        workload: What is synchronised.
        layout: Where the ranks run.
        link: Bits a second of each node's link, or of each rank's where all are on one node.
        speed: Cost of compressing on this machine, at the settings' density and value format.
        shards: Ranks per replica of ``dct_fsdp``, None for ``dct``. With shards, ``rows`` raises a ValueError if FSDP2
            cannot shard a parameter.
    """

    config: DCTConfig
    workload: Workload
    layout: NodeLayout
    link: float
    speed: Speed
    shards: int | None = None

    @cached_property
    def _groups(self) -> list[Group]:
        """The ranks that exchange with each other; the first ranks of replicas hold the largest shards."""
        if self.shards is None:
            return [(self.workload, self.layout)]
        return groups_of(self.workload, self.layout, self.shards, by_unit=self.config.compress == "gradients")

    @cached_property
    def choice(self) -> ExchangeChoice:
        """That of ``exchange="auto"``."""
        largest, peers = self._groups[0]
        return choose_for_model(self.config, largest.parameters, peers)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The dense all-reduce, and each exchange that is possible."""
        config, layout, every, groups = self.config, self.layout, self.config.round_length, self._groups
        fsdp = SentBytes() if self.shards is None else fsdp_bytes(self.workload, layout, self.shards)
        largest, peers = groups[0]
        world_size, local = len(peers.places), peers.ranks_per_node
        dense = step_of_all(dense_step, groups, fsdp, 1)
        rows = [Row(DENSE, dense, 1, 1.0, link_seconds(dense, layout, self.link), 0.0)]
        for name in ("all_gather", "sharded", "by_node"):
            if name == "by_node" and any(ranks.obstacle is not None for _, ranks in groups):
                continue
            step = step_of_all(partial(compressed_step, name, config), groups, fsdp, every)
            if name == "by_node" or self.shards is not None:
                most = max(1, *(sent.between for sent in step.sent))
                ratio = (max(sent.between for sent in dense.sent) - fsdp.between) / most
            else:
                ratio = dense.sent[0].total / max(1, *(sent.total for sent in step.sent))  # all gradients may be sparse
            busy = link_seconds(step, layout, self.link)
            compressing = self.speed.seconds(name, step.entries, world_size, local)
            if config.compress == "updates":
                compressing += self.speed.move * sum(largest.sizes_under(config))
            rows.append(Row(name, step, every, ratio * every, busy / every, compressing / every))
        return tuple(rows)

    def row(self, name: str) -> Row:
        """The row of a name."""
        return next(row for row in self.rows if row.name == name)


def layout_of(world_size: int, nodes: int) -> NodeLayout:
    """Ranks spread evenly over nodes, in their order.

    Raises:
        ValueError: There is one rank, there are too many, or the nodes do not divide them.
    """
    if world_size < 2:
        raise ValueError(f"`--world-size {world_size}`: one rank has nobody to send to. Give 2 or more")
    if world_size > MOST_RANKS:
        raise ValueError(f"`--world-size {world_size}`: plans are made for {MOST_RANKS:,} ranks at most")
    if nodes < 1 or world_size % nodes:
        possible = [str(count) for count in range(1, world_size + 1) if world_size % count == 0]
        raise ValueError(
            f"`--nodes {nodes}` does not divide `--world-size {world_size}`: every node must have the same number of"
            f" ranks. Give {', '.join(possible[:-1])} or {possible[-1]}"
        )
    return NodeLayout(tuple(divmod(rank, world_size // nodes) for rank in range(world_size)))


def link_seconds(step: Step, layout: NodeLayout, link: float) -> float:
    """How long the busiest node's link is busy, and the exchange inside that node.

    The ranks of a node share its link. Like ``exchange="auto"``, this assumes that bytes inside a node move faster.
    """
    local = layout.ranks_per_node
    nodes = [step.sent[first : first + local] for first in range(0, len(step.sent), local)]
    busiest = max(sum(sent.between + sent.inside / INSIDE_IS_FASTER for sent in node) for node in nodes)
    return 8 * busiest / link


def describe(forecast: Forecast, more: Sequence[str]) -> str:
    """The title, the table and the notes, with some more."""
    notes = "\n".join(f"- {note}" for note in [*_notes(forecast), *more])
    return f"{_title(forecast)}\n\n{plain_table(_table(forecast))}\n\n{notes}"


def _title(forecast: Forecast) -> str:
    config, layout = forecast.config, forecast.layout
    sizes = forecast.workload.sizes_under(config)
    every = "step" if config.round_length == 1 else f"{config.round_length:,} steps"
    what = "gradients" if config.compress == "gradients" else f"updates every {every}"
    replicas = "" if forecast.shards is None else f" in replicas of {_many(forecast.shards, 'shard')}"
    return (
        f"{_many(sum(sizes), 'parameter')} in {_many(len(sizes), 'tensor')},"
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
        between = (max(sent.between for sent in row.step.sent) // row.local_steps for row in columns)
        rows.insert(2, [f"of them {where}", *(f"{num_bytes:,}" for num_bytes in between)])
    return rows


def _notes(forecast: Forecast) -> list[str]:
    chosen, dense = forecast.row(forecast.choice.name), forecast.row(DENSE)
    rival = "strategy='ddp'" if forecast.shards is None else "HSDP"
    notes = [f'exchange="auto" takes {chosen.name!r}: {forecast.choice.reason}.']
    if forecast.workload.sparse and forecast.config.compress == "updates":
        notes.append(
            "The dense column leaves out embeddings with sparse gradients, and the others have them. So compare a run"
            " with both strategies."
        )
    elif chosen.seconds < dense.seconds:
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
