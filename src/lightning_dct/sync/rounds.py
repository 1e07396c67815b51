"""When an optimizer's parameters are exchanged, in which buckets, and which updates are in flight."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dct.compress.awaited import must_not_wait
from lightning_dct.compress.bucket_plan import Bucket, real_dtype, real_numel
from lightning_dct.exchange.base import Message
from lightning_dct.sync.optimizer_trial import Trial
from lightning_dct.sync.shared_decay import SharedDecay
from lightning_dct.sync.step_cosine import WHOLE, StepCosine
from lightning_dct.traffic import FP32_BYTES, all_gather_bytes, all_reduce_bytes

# Entries. One bucket is compressed while others are in flight. Smaller buckets cost more calls. Larger ones take more
# memory, and leave the link idle while the first is compressed and the last is decompressed. A GPU compresses a hundred
# times as fast as a CPU, and a launch costs it as much as a million entries.
LARGEST_BUCKET, LARGEST_ON_GPU = 1 << 20, 1 << 27
# With this many entries in flight behind the oldest bucket, and those of a whole bucket, that one is applied before the
# next is compressed. So buckets of a single large tensor overlap, too.
MOST_IN_FLIGHT = 1 << 21
# Below this a collective costs more in latency than in bytes.
SMALLEST_BUCKET = 1 << 16


@dataclass(eq=False)
class InFlight:
    """The updates of some parameters that have been sent and not yet applied.

    Attributes:
        names: The parameters.
        entries: Their entries.
        due: The optimizer's step after which the mean is applied.
        message: What has been sent. Its result are payloads, or the mean, shape ``[n]``.
        own: Shape ``[n]``: what this rank has sent, or has given to its node; None if that is among the payloads.
        bucket: Both sets of weights, if they cannot have moved since.
    """

    names: Sequence[str]
    entries: int
    due: int
    message: Message
    own: Tensor | None
    bucket: Bucket | None = None


@dataclass
class Rounds:
    """One optimizer's parameters and its clock.

    Attributes:
        steps: Its steps so far.
        names: Its parameters that take part.
        known: These, and parameters that are known not to take part.
        buckets: The names by bucket.
        what: A digest of what is exchanged: the parameters, their sizes and buckets.
        said: A description of it, for messages.
        dense_entries: Entries that the dense fp32 exchange of its gradients would send in a step; None if not counted.
        sparse: Parameters with sparse gradients, of which that exchange would send the rows that a step has used.
        without_gradient: Parameters that have had no gradient yet, sparse or dense.
        in_flight: Updates that have not been applied.
        cosine: How alike the steps of the ranks are.
        decay: Decays their shared weights.
        tried: The optimizer that ``trial`` is of, and how many groups it had.
        trial: How its steps depend on gradients and weight decay.
        since_buffers: Its steps since an exchange has averaged buffers.
    """

    steps: int = 0
    names: list[str] = field(default_factory=list)
    known: set[Tensor] = field(default_factory=set)
    buckets: list[list[str]] = field(default_factory=list)
    what: str = ""
    said: str = ""
    dense_entries: int | None = None
    sparse: list[Tensor] = field(default_factory=list)
    without_gradient: list[Tensor] = field(default_factory=list)
    in_flight: list[InFlight] = field(default_factory=list)
    cosine: StepCosine = field(default_factory=StepCosine)
    decay: SharedDecay = field(default_factory=SharedDecay)
    tried: tuple[ref[Optimizer], int] | None = None
    trial: Trial = field(default_factory=Trial)
    since_buffers: int = 0

    def due(self, length: int, takes_turns: bool) -> list[list[str]]:
        """The buckets that are sent after this step, ``length`` steps after the last time.

        Buckets that take turns are left out while they are still in flight from a short first round.
        """
        if not takes_turns:
            return self.buckets if is_due(self.steps, length) else []
        in_flight = {name for item in self.in_flight for name in item.names}
        return [
            bucket
            for place, bucket in enumerate(self.buckets)
            if is_due(self.steps, length, place, len(self.buckets)) and in_flight.isdisjoint(bucket)
        ]

    def bytes_under_ddp(self, parameters: Mapping[str, Tensor], ranks: int) -> int:
        """Bytes that DistributedDataParallel would have sent for this step, of all parameters by name."""
        late = self.without_gradient and any(one.grad is not None for one in self.without_gradient)
        if self.dense_entries is None or late:
            own = [parameters[name] for name in self.names]
            unknown = own if self.dense_entries is None else self.without_gradient
            self.sparse += [one for one in unknown if one.grad is not None and one.grad.is_sparse]
            self.without_gradient = [one for one in unknown if one.grad is None]
            self.dense_entries = sum(map(real_numel, own)) - sum(map(real_numel, self.sparse))
        num_bytes = all_reduce_bytes(FP32_BYTES * self.dense_entries, ranks)
        for parameter in self.sparse:
            if (gradient := parameter.grad) is not None:
                num_bytes += all_gather_bytes(gradient._indices().nbytes + gradient._values().nbytes, ranks)
        return num_bytes


def is_due(step: int, length: int, place: int = 0, places: int = 1) -> bool:
    """Whether bucket number ``place`` of ``places`` that take turns is exchanged after a step (from 1 on)."""
    return (step - place * length // places) % length == 0


def buckets_of(parameters: Sequence[tuple[str, Tensor]], turns: int) -> list[list[str]]:
    """Divide parameters, in the model's order, into buckets of one dtype and device each.

    A parameter that fills a bucket has one of its own. ``turns`` is the number of buckets of equal size, if the
    parameters are large enough for that.
    """
    entries = sum(real_numel(parameter) for _, parameter in parameters)
    on_gpu = any(must_not_wait(parameter.device) for _, parameter in parameters)
    largest = min(LARGEST_ON_GPU if on_gpu else LARGEST_BUCKET, max(SMALLEST_BUCKET, -(-entries // turns)))
    buckets: list[list[str]] = []
    # The current bucket by dtype and device: its number, and its entries so far.
    filling: dict[tuple[torch.dtype, torch.device], tuple[int, int]] = {}
    for name, parameter in parameters:
        kind, size = (real_dtype(parameter), parameter.device), real_numel(parameter)
        if size >= largest:
            buckets.append([name])
            continue
        number, filled = filling.get(kind, (0, largest))
        if filled + size > largest or kind not in filling:
            number, filled = len(buckets), 0
            buckets.append([])
        buckets[number].append(name)
        filling[kind] = number, filled + size
    return buckets


def save_rounds(
    rounds: Mapping[int, Rounds],
    parameters: Mapping[str, Tensor],
    to_refresh: Collection[str],
    read: Callable[[InFlight], tuple[Tensor, Tensor]],
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """The clocks as numbers, and the completed updates in flight as CPU tensors by parameter.

    ``rounds`` are by the number of the optimizer. ``to_refresh`` are the parameters whose thresholds are selected anew
    when they are next sent. ``read`` gives the mean and what this rank has sent.
    """
    clocks = {f"refresh {name}": 1 for name in to_refresh}
    in_flight: dict[str, Tensor] = {}
    for number, own_rounds in rounds.items():
        clocks[f"steps of {number}"] = own_rounds.steps
        clocks[f"unaveraged of {number}"] = own_rounds.since_buffers
        clocks[f"cosine of {number}"] = own_rounds.cosine.value
        if own_rounds.cosine.measured is not None:
            clocks[f"measured of {number}"] = own_rounds.cosine.measured
        for name in own_rounds.decay.left_out | own_rounds.decay.known:
            clocks[f"undecayed in {number} {name}"] = int(name in own_rounds.decay.left_out)
        for item in own_rounds.in_flight:
            sizes = [real_numel(parameters[name]) for name in item.names]
            means, owns = (both.split(sizes) for both in read(item))
            for name, mean, own in zip(item.names, means, owns, strict=True):
                clocks[f"due in {number} {name}"] = item.due
                in_flight |= {f"mean of {name}": mean.cpu().clone(), f"own of {name}": own.cpu().clone()}
    return clocks, in_flight


def load_rounds(
    clocks: Mapping[str, int], in_flight: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> tuple[dict[int, Rounds], set[str]]:
    """Undo :func:`save_rounds`: the rounds by the number of the optimizer, and the parameters to refresh."""
    rounds: dict[int, Rounds] = {}
    to_refresh = set()
    for key, value in clocks.items():
        what, _, of = key.partition(" ")
        if what == "refresh":
            to_refresh.add(of)
        elif what in ("steps", "unaveraged", "cosine", "measured"):
            own = rounds.setdefault(int(of.removeprefix("of ")), Rounds())
            if what in ("steps", "unaveraged"):
                setattr(own, "steps" if what == "steps" else "since_buffers", value)
            else:
                setattr(own.cosine, "value" if what == "cosine" else "measured", min(value, WHOLE))
        elif what == "undecayed":
            _, number, name = of.split(" ", 2)
            decay = rounds.setdefault(int(number), Rounds()).decay
            (decay.left_out if value else decay.known).add(name)
        else:
            _, number, name = of.split(" ", 2)
            if name in parameters and f"mean of {name}" in in_flight:
                device = parameters[name].device
                mean, sent = (in_flight[f"{part} of {name}"].to(device) for part in ("mean", "own"))
                flying = InFlight([name], mean.numel(), value, Message.arrived(mean), sent)
                rounds.setdefault(int(number), Rounds()).in_flight.append(flying)
    return rounds, to_refresh
