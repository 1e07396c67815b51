"""The optimizers of a model: their numbers, and when the parameters of each are exchanged, in which
buckets.

Numbers are the same on all ranks and after a resume.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dct.compress.awaited import must_not_wait
from lightning_dct.compress.bucket_plan import Bucket, real_dtype, real_numel
from lightning_dct.exchange.base import Transfer
from lightning_dct.sync.coherence import Coherence
from lightning_dct.sync.optimizer_state import SharedSquares
from lightning_dct.sync.optimizer_trial import Trial
from lightning_dct.sync.row_gradients import bytes_of_gradients
from lightning_dct.sync.shared_decay import OwnDecay, SharedDecay
from lightning_dct.traffic import FP32_BYTES, all_reduce_bytes

# Entries. One bucket is compressed while others are in flight. Smaller buckets cost more calls.
# Larger ones take more memory, and leave the link idle while the first is compressed and the last
# is decompressed. A GPU compresses a hundred times as fast as a CPU, and a launch costs it as much
# as a million entries.
LARGEST_BUCKET = 1 << 20
LARGEST_ON_GPU = 1 << 27
# With this many entries in flight behind the oldest bucket, and those of a whole bucket, that one
# is applied before the next is compressed. So buckets of a single large tensor overlap, too.
MOST_IN_FLIGHT = 1 << 21
# Below this a collective costs more in latency than in bytes.
SMALLEST_BUCKET = 1 << 16


class KnownOptimizers:
    """The optimizers whose steps are exchanged.

    Args:
        fixed: Gives those that a Trainer knows, in its order. They have the first numbers.
    """

    def __init__(self, fixed: Callable[[], Sequence[Optimizer]] = tuple) -> None:
        self._fixed = fixed
        self._others: list[ref[Optimizer]] = []

    def all(self) -> list[Optimizer | None]:
        """All of them by number; None for one that the user has dropped."""
        fixed: list[Optimizer | None] = list(self._fixed())
        return fixed + self.others() if self._others else fixed

    def others(self) -> list[Optimizer | None]:
        """Those that a Trainer does not know."""
        return [one() for one in self._others]

    def has(self, optimizer: Optimizer) -> bool:
        """Whether this very one has a number."""
        return any(one is optimizer for one in self.all())

    def number_of(self, optimizer: Optimizer) -> int | None:
        """The number of an optimizer; None if it has none.

        An optimizer that wraps another one has the same number as that.
        """
        known = self.all()
        for number, one in enumerate(known):
            if one is optimizer:
                return number
        for number, one in enumerate(known):
            if one is not None and are_wrapped(one, optimizer):
                return number
        return None

    def add(self, optimizer: Optimizer) -> None:
        """Give an optimizer the next number."""
        self._others.append(ref(optimizer))

    def dropped(self) -> list[int]:
        """The numbers of those that the user has dropped."""
        return [number for number, one in enumerate(self.all()) if one is None]

    def exchange_numbers(self, dropped: int, successor: Optimizer) -> None:
        """Give an optimizer the number of one that was dropped."""
        place = dropped - len(self._fixed())
        own = [one() for one in self._others].index(successor)
        self._others[place], self._others[own] = self._others[own], self._others[place]


def are_wrapped(one: Optimizer, other: Optimizer) -> bool:
    """Whether one of two optimizers wraps the other, as SAM and Lookahead do.

    Then one is an attribute of the other, or they have a group of parameters in common: the object,
    not its contents.
    """
    if any(inner is other for inner in vars(one).values()):
        return True
    if any(inner is one for inner in vars(other).values()):
        return True
    groups = {id(group) for group in one.param_groups}
    return any(id(group) in groups for group in other.param_groups)


@dataclass(eq=False)
class InFlight:
    """The updates of some parameters that have been sent and not yet applied.

    Attributes:
        names: The parameters.
        entries: Their entries.
        due: The optimizer's step after which the mean is applied.
        transfer: Its result are payloads, or the mean, shape ``[n]``.
        own: Shape ``[n]``: what this rank has sent, or has given to its node; None if that is among
            the payloads.
        bucket: Both sets of weights, if they cannot have moved since.
    """

    names: Sequence[str]
    entries: int
    due: int
    transfer: Transfer
    own: Tensor | None
    bucket: Bucket | None = None


@dataclass
class OptimizerClock:
    """One optimizer's parameters and its clock.

    Attributes:
        steps: Its steps so far.
        names: Its parameters that take part.
        known: These, and parameters that are known not to take part.
        by_gradient: Those of which ranks exchange gradients before a step, and no updates; see
            :mod:`lightning_dct.sync.row_gradients`.
        has_means: Whether they have done so for the step that has begun.
        own_gradients: What this rank's gradients were before, if it is measured how far they agree.
        buckets: The names of the others by bucket.
        digest: That of what is exchanged: the parameters, their sizes and buckets.
        description: Of what is exchanged, for messages.
        dense_entries: Entries that the dense fp32 exchange of its gradients would send in a step;
            None if not counted.
        sparse: Parameters with sparse gradients, of which that exchange would send the rows that a
            step has used.
        without_gradient: Parameters that have had no gradient yet, sparse or dense.
        in_flight: Updates that have not been applied.
        coherence: How far the ranks' gradients agree.
        holds_back: Whether own weights are without what this rank has not sent, from the next
            exchange on.
        squares: Averages what the optimizer has learnt about the size of gradients.
        decay: Decays their shared weights.
        own_decay: Does so where ranks may make different steps.
        tried: The optimizer that ``trial`` is of, and how many groups it had.
        trial: How its steps depend on gradients and weight decay.
        since_buffers: Its steps since an exchange has averaged buffers.
    """

    steps: int = 0
    names: list[str] = field(default_factory=list)
    known: set[Tensor] = field(default_factory=set)
    by_gradient: list[str] = field(default_factory=list)
    has_means: bool = False
    own_gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buckets: list[list[str]] = field(default_factory=list)
    digest: str = ""
    description: str = ""
    dense_entries: int | None = None
    sparse: list[Tensor] = field(default_factory=list)
    without_gradient: list[Tensor] = field(default_factory=list)
    in_flight: list[InFlight] = field(default_factory=list)
    coherence: Coherence = field(default_factory=Coherence)
    holds_back: bool = False
    squares: SharedSquares = field(default_factory=SharedSquares)
    decay: SharedDecay = field(default_factory=SharedDecay)
    own_decay: OwnDecay = field(default_factory=OwnDecay)
    tried: tuple[ref[Optimizer], int] | None = None
    trial: Trial = field(default_factory=Trial)
    since_buffers: int = 0

    @property
    def exchanges(self) -> bool:
        """Whether its optimizer steps parameters that take part; true of one that has not stepped
        since a resume.
        """
        return bool(self.names) or self.tried is None

    @property
    def by_update(self) -> list[str]:
        """Its parameters of which ranks exchange updates."""
        return [name for name in self.names if name not in self.by_gradient]

    @property
    def decays(self) -> bool:
        """Whether its shared weights decay by themselves."""
        return self.trial.is_scale_invariant and any(self.trial.decays)

    def due_buckets(self, length: int, takes_turns: bool) -> list[list[str]]:
        """The buckets that are sent after this step, ``length`` steps after the last time.

        Buckets that take turns are left out while they are still in flight from a short first
        round.
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
        """Bytes that DistributedDataParallel would have sent for this step, of all parameters by
        name, but for those that are exchanged by gradient.
        """
        late = self.without_gradient and any(one.grad is not None for one in self.without_gradient)
        if self.dense_entries is None or late:
            own = [parameters[name] for name in self.by_update]
            unknown = own if self.dense_entries is None else self.without_gradient
            self.sparse += [one for one in unknown if one.grad is not None and one.grad.is_sparse]
            self.without_gradient = [one for one in unknown if one.grad is None]
            self.dense_entries = sum(map(real_numel, own)) - sum(map(real_numel, self.sparse))
        num_bytes = all_reduce_bytes(FP32_BYTES * self.dense_entries, ranks)
        if self.sparse:
            num_bytes += bytes_of_gradients(self.sparse, ranks)
        return num_bytes


def is_due(step: int, length: int, place: int = 0, places: int = 1) -> bool:
    """Whether bucket number ``place`` of ``places`` that take turns is exchanged after a step (from
    1 on).
    """
    return (step - place * length // places) % length == 0


def buckets_of(parameters: Sequence[tuple[str, Tensor]], turns: int) -> list[list[str]]:
    """Divide parameters, in the model's order, into buckets of one dtype and device each.

    A parameter that fills a bucket has one of its own. ``turns`` is the number of buckets of equal
    size, if the parameters are large enough for that.
    """
    entries = sum(real_numel(parameter) for _, parameter in parameters)
    on_gpu = any(must_not_wait(parameter.device) for _, parameter in parameters)
    largest = min(
        LARGEST_ON_GPU if on_gpu else LARGEST_BUCKET, max(SMALLEST_BUCKET, -(-entries // turns))
    )
    buckets: list[list[str]] = []
    # The current bucket by dtype and device: its number, and its entries so far.
    filling: dict[tuple[torch.dtype, torch.device], tuple[int, int]] = {}
    for name, parameter in parameters:
        kind = (real_dtype(parameter), parameter.device)
        size = real_numel(parameter)
        if size >= largest:
            buckets.append([name])
            continue
        number, filled = filling.get(kind, (0, largest))
        if filled + size > largest or kind not in filling:
            number = len(buckets)
            filled = 0
            buckets.append([])
        buckets[number].append(name)
        filling[kind] = number, filled + size
    return buckets
