"""The whole method in one file, for reading: every rank is an entry of a list, and nothing is fast.

Gupta et al. (*Training Recommender Systems at Scale: Communication-Efficient Model and Data
Parallelism*, KDD 2021) exchange gradients in this way. This package also exchanges the movement of
*weights* and *embedding rows* in this way:

    a    = what this rank has not sent yet
    M    = |a| >= tau                         about *target* entries
    sent = the entries of a under M, in few bits
    e    = a - sent                           the *residual*: it is sent later, so nothing is dropped

Tests compare the package with this file bit for bit. Where a formula can be rounded in several
ways, this code follows the package. Tensors are flat, in fp32 or fp64. Loss scaling, activations
and the transport of bytes are left out.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny  # the smallest threshold: zeros are never sent
ONE = torch.ones(1)
BITS = {"fp32": 32, "bf16": 16, "2bit": 2, "1bit": 1}


@dataclass(frozen=True)
class Settings:
    """Settings of :class:`~lightning_dct.DCTConfig`, and ``ranks_per_node`` for
    ``exchange="hierarchical"``.
    """

    density: float = 0.3
    value_format: str = "1bit"
    min_tensor_size: int = 16
    adapt_threshold: bool = True
    refresh_every: int = 1000
    exchange: str = "all_gather"
    ranks_per_node: int = 1
    local_steps: int = 1
    warmup_steps: int = 320
    residual_decay: float | None = None
    overlap_steps: int = 0


# 1. Thresholds (compress/threshold.py). A selection costs many times as much as a comparison. So it
#    runs only every thousand steps, as the paper proposes, and on a sample of a large tensor. In
#    between, the guard moves the threshold a little towards its target.


def exact_threshold(a: Tensor, target: int) -> float:
    """The ``target``-th largest magnitude; infinite and NaN entries count as zero."""
    magnitudes = a.abs().nan_to_num(nan=0.0, posinf=0.0)
    return max(float(magnitudes.sort(descending=True).values[target - 1]), TINY)


def selected_threshold(a: Tensor, target: int) -> float:
    """The threshold of a sample: one entry at a hashed place in each stretch of a large tensor."""
    size = a.numel()
    wanted = max(16384, math.ceil(400 * size / target))
    if size < 2 * wanted:
        return exact_threshold(a, target)
    stretch = size // wanted
    places = [
        number * stretch + (number * 0x9E3779B1 % 2**32 >> 16) % stretch for number in range(wanted)
    ]
    return exact_threshold(a[places], max(1, math.ceil(target * wanted / size)))


def nudged(threshold: float, size: int, reached: int, target: int, aim: float = 0.98) -> float:
    """The next threshold, from the number of entries that reached this one.

    Aims 2% low, because excess waits.
    """
    factor = ((reached + 0.5) / (aim * target + 0.5)) ** (0.3 * math.sqrt(target / size))
    return max(threshold * min(max(factor, 1 / 1.25), 1.25), TINY)


# 2. Values and positions in few bits (wire/). Few are enough, because the residual keeps the
#    rounding errors.


def as_read(values: Tensor, value_format: str) -> Tensor:
    """The values that receivers decode, in fp32. All values of one tensor share one scale."""
    if value_format == "fp32" or not values.numel():
        return values.float()
    if value_format == "bf16":  # the nearest; finite values stay finite
        limit = min(torch.finfo(torch.bfloat16).max, torch.finfo(values.dtype).max)
        return torch.where(values.isinf(), values, values.clamp(-limit, limit)).bfloat16().float()
    magnitudes = values.abs().double()
    mean = magnitudes.mean()
    if value_format == "1bit":  # sign(v) * mean |v|
        return torch.where(values > 0, mean.float(), -mean.float())
    # 2bit: sign(v) times a scale, or twice that from the mean on, where that fits better
    levels = torch.where(magnitudes >= mean, 2.0, 1.0).double()
    product = (magnitudes * levels).sum()
    square = levels.square().sum()
    scale = product / square
    if not (
        product * product / square > magnitudes.sum() * mean
        and scale <= torch.finfo(torch.float32).max / 2
    ):
        scale = mean
        levels = torch.ones_like(levels)
    return torch.where(values > 0, levels, -levels).float() * scale.float()


def position_bits(positions: list[int], size: int, capacity: int) -> list[int]:
    """Positions of entries in about ``2 + log2(size / capacity)`` bits each: the Elias-Fano code
    (1974).

    Low bits are written as they are. High bits hardly grow from one position to the next: number
    ``i`` sets one flag, ``high + i``. The number of bits depends on ``capacity`` alone. A bitmap
    takes its place where that is shorter.
    """
    counts = [
        capacity + (max(size - 1, 0) >> low) + 1 + low * capacity
        for low in range(max(size.bit_length(), 1))
    ]
    bitmap = size <= min(counts)
    low = 0 if bitmap else counts.index(min(counts))
    flags = [0] * (size if bitmap else counts[low] - low * capacity)
    planes = [[0] * capacity for _ in range(low)]
    for i, position in enumerate(positions):
        flags[(position >> low) + (0 if bitmap else i)] = 1
        for bit in range(low):
            planes[bit][i] = position >> bit & 1
    return sum(planes, flags)


# 3. One sender (compress/bucket_plan.py, compress/codec.py, kernels/).


def target_of(tensor: Tensor, ranks: int, settings: Settings, share: float = 1.0) -> int:
    """How many entries of a tensor are sent.

    0 means dense: it is small, all of it is wanted, or dense is shorter.

    A payload traverses each link ``traversals`` times. An all-reduced tensor traverses it twice.
    """
    size = tensor.numel()
    hierarchical = (ranks // settings.ranks_per_node - 1) * ranks / max(ranks - 1, 1)
    traversals = {"all_gather": ranks, "two_phase": 2, "hierarchical": hierarchical}[
        settings.exchange
    ]
    density = settings.density if settings.density == 1.0 else share * settings.density
    target = max(1, math.ceil(density * size * (1 - 1e-12)))
    bits = traversals * target * (BITS[settings.value_format] + 2 + math.log2(size / target))
    dense = size < settings.min_tensor_size or target >= size or ranks == 1
    return 0 if dense or bits >= 2 * size * tensor.element_size() * 8 else target


def fitting(a: Tensor, threshold: float, target: int) -> tuple[Tensor, int, float]:
    """Which entries of a tensor are sent, how many reach the threshold, and a second one for those
    if not all fit.

    The second comes from a regular sample of them. If more than ``target`` reach both, a regular
    sample is sent. A tensor with infinite or NaN entries sends only those, so that all ranks see
    them.
    """
    limit = 0.0
    mask = a.abs() >= torch.tensor(max(threshold, TINY), dtype=a.dtype)  # M
    if not bool(a.isfinite().all()):
        mask = ~a.isfinite()
    reached = count = int(mask.sum())
    if reached > target and bool(a.isfinite().all()):
        wanted = min(4096, a.numel())
        sampled = a[mask][[number * reached // wanted for number in range(wanted)]]
        limit = exact_threshold(sampled, -(-wanted * target // reached))
        mask = mask & (a.abs() >= torch.tensor(limit, dtype=a.dtype))
        count = int(mask.sum())
    if count > target:
        number = mask.cumsum(0)
        mask = mask & (number * target // count > (number - 1) * target // count)
    return mask, reached, limit


@dataclass
class State:
    """A sender's state of a tensor between two exchanges. The threshold belongs to this target."""

    residual: Tensor | float = 0.0
    threshold: float = 0.0
    target: int = 0  # a refresh sets 0, so that the threshold is selected again


def send(
    news: Tensor, state: State, target: int, settings: Settings, ranks_keep_unsent: bool = False
) -> Tensor:
    """What a sender sends of one tensor, as receivers decode it: the paper's data-parallel method.

    A sender of sums of updates forgets what it does not send, because the ranks keep that in their
    own weights.
    """
    # a = e + g
    a = state.residual + news
    before = state.residual
    sent = a
    if target:
        if state.target != target:
            state.threshold = selected_threshold(a, target)
            state.target = target
        mask, reached, limit = fitting(a, state.threshold, target)
        sent = torch.zeros_like(a)
        sent[mask] = as_read(a[mask], settings.value_format).to(a.dtype)
        if settings.adapt_threshold and bool(a.isfinite().all()):
            nudge = nudged(state.threshold, a.numel(), reached, target)
            state.threshold = limit if reached > 2 * target else nudge
    # E = a - sent; never NaN or infinity.
    state.residual = torch.where((a - sent).isfinite(), a - sent, before)
    if ranks_keep_unsent and target:
        state.residual = torch.where(sent != 0, state.residual, before)
    return sent


# 4. One exchange (exchange/): the mean over ranks of what they send of a tensor, the same on all
#    ranks. Means of updates have gains (6). Some go by the number of senders, n of W ranks.

# Of one tensor, by sender, its number, a piece's first entry.
States = defaultdict[tuple[str, int, int], State]


def weighted_sum(
    sent: list[Tensor], weight: float, dense: bool, gain: Tensor, gain_of_all: float | None
) -> Tensor:
    """``weight`` times the sum in the ranks' order, times each entry's gain.

    Compressed tensors may have one gain of all instead, at most ``W / n``; None is ``sqrt(W / n)``.
    """
    senders = torch.stack([(one != 0) | dense for one in sent]).double().sum(0).clamp(min=1)
    fewer = len(sent) / senders
    factor = fewer.sqrt() if gain_of_all is None else fewer.clamp(max=gain_of_all)
    total = torch.zeros_like(sent[0])
    for one in sent:
        total = total + one
    total = total * (weight * factor).to(total.dtype)
    return total * gain.to(total.dtype) if dense or gain_of_all == 1.0 else total


def send_sum(
    total: Tensor, owner: State, target: int, settings: Settings, is_update: bool
) -> Tensor:
    """What an owner sends of its sum: three times as many entries as a rank, in 2 bits instead of
    one.
    """
    goal = max(target, min(3 * target, 3 * total.numel() // 4)) if target else 0
    finer = replace(
        settings, value_format="2bit" if settings.value_format == "1bit" else settings.value_format
    )
    return send(total, owner, goal, finer, is_update)


def exchange(
    tensors: list[Tensor],
    states: States,
    settings: Settings,
    share: float = 1.0,
    gain: Tensor = ONE,
    gain_of_all: float | None = 1.0,
    is_update: bool = False,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Exchange one tensor of all ranks.

    Returns the mean, what each rank has sent, and the part of it that counts.

    If several ranks sum, each owns some pieces of the tensor. A piece is sent like a tensor. (So is
    a piece of a tensor that is too large to be handled at once, which this file leaves out.)
    """
    size = tensors[0].numel()
    ranks = len(tensors)
    per_node = settings.ranks_per_node
    target, usual = (target_of(tensors[0], ranks, settings, part) for part in (share, 1.0))
    owners = {"all_gather": 1, "two_phase": ranks, "hierarchical": per_node}[settings.exchange]
    count = max(1, min(owners, (usual or size) // 32))
    means = []
    sent_by_piece = []
    counted_by_piece = []
    for start, stop in pairwise(size * piece // count for piece in range(count + 1)):
        parts = [tensor[start:stop] for tensor in tensors]
        goal = -(-target * (stop - start) // size)
        gains = gain if gain is ONE else gain[start:stop]
        of_all = gain_of_all
        news = parts
        sender = "rank"
        hierarchical = settings.exchange == "hierarchical"
        if hierarchical:  # dense inside a node, which then is one sender
            nodes = [parts[first : first + per_node] for first in range(0, ranks, per_node)]
            news = [
                torch.stack([part / per_node for part in node]).sum(0) * per_node for node in nodes
            ]
            sender = "node"
        keep = hierarchical and is_update
        sent = [
            send(one, states[sender, number, start], goal, settings, keep)
            for number, one in enumerate(news)
        ]
        own = parts if hierarchical else sent
        # The owner sends a part of the sum, and keeps a residual.
        if settings.exchange == "two_phase":
            total = weighted_sum(sent, 1.0, not target, gains, of_all)
            gains = ONE
            of_all = 1.0
            sent = [send_sum(total, states["owner", 0, start], goal, settings, is_update)]
        # A rank's update counts if its node, or the owner of the sum, has sent that entry.
        passed = [one for one in sent for _ in range(ranks // len(sent))]
        counted = [
            c.where((one != 0) | (not goal), 0.0) for c, one in zip(own, passed, strict=True)
        ]
        sent_by_piece.append(own)
        counted_by_piece.append(counted)
        means.append(weighted_sum(sent, 1 / ranks, not target, gains, of_all))
    mine, counted = (
        [torch.cat(p) for p in zip(*every, strict=True)]
        for every in (sent_by_piece, counted_by_piece)
    )
    return torch.cat(means), mine, counted


# 5. Gradients (sync/gradients.py), in every backward, as in the paper: ``g' = 1/W * sum over ranks
#    of the sent part`` of ``g + e``. ``exchange`` of gradients does it: all ranks have the same
#    weights, and step with the same mean.

# 6. Updates (sync/updates.py), the default. Each rank trains its own weights ``w``. The shared
#    weights ``S`` are the same on all ranks. ``w - S`` is what a rank has moved and not sent yet,
#    so it is the residual.

# Adam divides by the root of a running mean ``v`` of squares. Of the mean gradient, which
# DistributedDataParallel has, that is smaller by ``R / W`` (sync/coherence.py). So if ranks
# exchange after every step, the mean of their updates is multiplied by ``sqrt(W / R)``. Rows and
# columns of a tensor have an ``R`` each, from samples, with the optimizer's own memory. Without
# squares in the optimizer's state its steps are compared. Steps of SGD grow with their gradients,
# and then the plain mean is the step of DistributedDataParallel. If few entries are sent, all
# tensors have one ``R``, and no entry goes further than its senders have moved it: ``W / n`` times
# the mean at most. If ranks are several steps apart it is ``sqrt(W / n)`` times. Shared weights
# decay by themselves (sync/shared_decay.py). Now and then the ranks average ``v``
# (sync/optimizer_state.py).


def is_measured(step: int) -> bool:
    """Whether the ranks compare what they have in a step."""
    return step <= 16 or step % (4 if step <= 64 else 16) == 0


class Compared:
    """Of one tensor: squares of sums over ranks, sums of squares, and numbers of samples: of rows,
    columns and all.
    """

    def __init__(self, shape: Sequence[int], memory: float | None) -> None:
        size = math.prod(shape)
        self.rows = shape[0] if len(shape) > 1 and size else 1
        self.columns = size // self.rows
        self.memory = memory
        self.latest = (torch.empty(0), torch.empty(0), torch.empty(0), 0.0)
        self.of_rows = torch.zeros(3, self.rows).double()
        self.of_columns = torch.zeros(3, self.columns).double()
        self.of_all = torch.zeros(3, 1).double()

    def places(self, step: int) -> Tensor:
        """The entries that are compared in a step: about one of each row, from other columns each
        time.
        """
        size = self.rows * self.columns
        width = self.columns if self.rows > 1 else 1
        stride = min(max(64, width, size // 65536), max(size // 16, 1))
        while math.gcd(stride, width) > 1:
            stride += 1
        return torch.arange(7919 * (step + step // 16) % stride, size, stride)

    def measure(self, step: int, by_rank: list[Tensor]) -> None:
        """Take the measurement before this one into the running means, and make this one."""
        places, of_sums, sums, weight = self.latest
        for known, number in (
            (self.of_rows, places // self.columns),
            (self.of_columns, places % self.columns),
        ):
            known.copy_(self._with(known, number, of_sums, sums, weight) if len(places) else known)
        if len(places):
            self.of_all = self._with(self.of_all, torch.zeros_like(places), of_sums, sums, weight)
        places = self.places(step)
        samples = [one.flatten()[places].float().bfloat16().double() for one in by_rank]
        total = torch.zeros(len(places)).double()
        squares = torch.zeros(len(places)).double()
        for sample in samples:
            total = total + sample
            squares = squares + sample.square()
        self.latest = places, total.square(), squares, self.weight_of(step)

    def weight_of(self, step: int) -> float:
        """The weight of a measurement in the running means."""
        if self.memory is None:
            return 1.0 if step == 1 else 0.25
        earlier = [before for before in range(1, step) if is_measured(before)]
        steps = step - earlier[-1] if earlier else step
        weight = steps / step
        if self.memory < 1:
            weight = (1 - self.memory**steps) / (1 - self.memory**step)
        return min(weight, max(0.25, steps / step))

    @staticmethod
    def _with(
        known: Tensor, number: Tensor, of_sums: Tensor, sums: Tensor, weight: float
    ) -> Tensor:
        kept = known * (1 - weight)
        size = known.shape[1]
        for row, values in enumerate((of_sums, sums)):
            kept[row] += torch.bincount(number, values, size) * weight
        kept[2] = known[2] + torch.bincount(number, minlength=size)
        return kept

    def coherence(self, ranks: int) -> float:
        """That of the whole tensor."""
        return min(max(float(self.of_all[0] / self.of_all[1]), 0.25), float(ranks))

    def gain(self, ranks: int, dtype: torch.dtype) -> Tensor:
        """What the mean of each entry is multiplied by."""
        if not self.of_all[1]:
            return ONE
        whole = self.coherence(ranks)
        if self.rows == 1:
            same = torch.full((self.columns,), math.sqrt(ranks / whole), dtype=torch.float64)
            return same.to(dtype)
        rows = (ranks / shrunk(self.of_rows, whole, ranks)).sqrt()
        columns = (whole / shrunk(self.of_columns, whole, ranks)).sqrt().clamp(0.5, 2)
        return (rows.to(dtype).unsqueeze(1) * columns.to(dtype)).flatten()


def shrunk(known: Tensor, whole: float, ranks: int) -> Tensor:
    """The coherence of rows or columns: with few samples near that of the whole tensor."""
    of_sums, sums, samples = known
    own = torch.where(sums > 0, of_sums / sums, whole)
    return ((own * samples + whole) / (samples + 1)).clamp(0.25, ranks)


def gain_of(compared: list[Compared], ranks: int) -> float:
    """The gain on the mean of all tensors together: the fewer entries are sent, the longer ranks go
    by what they have moved themselves, and then one gain is better.
    """
    of_sums, sums = (
        sum(float(one.of_all[part]) for one in compared if one.of_all[1]) for part in (0, 1)
    )
    if not sums:
        return 1.0
    return round(math.sqrt(ranks / min(max(of_sums / sums, 1.0), float(ranks))) * 64) / 64


class Averaged:
    """Of one tensor of one rank: how the sums of rows and columns of ``v`` have deviated from their
    mean over ranks.
    """

    def __init__(self) -> None:
        self.left = torch.empty(0)
        self.drift = torch.empty(0)
        self.persistence = 0.0

    def deviate(self, ratio: Tensor, mean: Tensor) -> None:
        """Note the deviations before an average, from the rank's sums in parts of the mean."""
        drift = ratio - 1.0
        correlation = 0.0
        if len(self.left):
            drift = drift - self.left
            product, square, former = (
                (one * mean).sum() for one in (drift * self.drift, drift**2, self.drift**2)
            )
            size = math.sqrt(float(square) * float(former))
            correlation = float(product) / size if size else 0.0
            self.persistence = 0.75 * self.persistence + 0.25 * correlation
        self.drift = drift


def turned(ratio: Tensor, share: float) -> Tensor:
    """What sums in parts of the mean become: those that are too large become too small, in the
    share that persists.
    """
    return torch.where(ratio > 0, ratio.clamp(0.25, 4.0) ** (-0.8 * share), 1.0)


def outer(rows: Tensor, columns: Tensor) -> Tensor:
    """``r_i c_j / t``, summed over the first dimension."""
    totals = rows.sum(1, keepdim=True)
    return torch.where(totals > 0, rows / totals, 0.0).T @ columns


def average_squares(
    by_rank: list[list[Tensor]],
    shapes: Sequence[Sequence[int]],
    bias: float,
    known: list[list[Averaged]],
) -> None:
    """Give each rank's ``v`` of all tensors the rows and columns of their mean, in place; the sums
    travel in bf16.
    """
    exact: list[list[Tensor]] = [[] for _ in shapes]
    for number, shape in enumerate(shapes):
        for squares in by_rank:
            v = squares[number].view(shape if len(shape) > 1 else (1, -1)).flatten(1)
            is_matrix = len(v) > 1 and v.shape[1] > 1
            sums = (
                [v.sum(1, dtype=torch.double), v.sum(0, dtype=torch.double)]
                if is_matrix
                else [v.flatten().double()]
            )
            exact[number].append(torch.cat(sums) / bias)
    of_all = [torch.stack(sums).bfloat16().float() for sums in exact]
    means = [sums.mean(0) for sums in of_all]
    for rank, own in enumerate(by_rank):
        ratios = [
            torch.where(mean > 0, sums[rank] / mean, 1.0)
            for sums, mean in zip(of_all, means, strict=True)
        ]
        for one, ratio, mean in zip(known[rank], ratios, means, strict=True):
            one.deviate(ratio, mean)
        persistence = sum(one.persistence for one in known[rank]) / len(shapes)
        share = min(max((persistence - 0.25) / (0.4 - 0.25), 0.0), 1.0)
        for number, (v, ratio, mean) in enumerate(zip(own, ratios, means, strict=True)):
            given = turned(ratio, share)
            known[rank][number].left = given - 1.0
            if len(ratio) == v.numel():  # a single row
                scaled = v * torch.where(ratio > 0, given / ratio, 1.0)
                v.copy_(torch.where(v > 0, scaled, mean * bias))
                continue
            sizes = [shapes[number][0], v.numel() // shapes[number][0]]
            rows, columns = of_all[number].split(sizes, dim=1)
            mean_products = outer(rows, columns) / len(by_rank)
            of_rows, of_columns = given.split(sizes)
            whole = (of_rows * mean[: sizes[0]]).sum() / mean[: sizes[0]].sum().clamp(min=TINY)
            mean_products *= of_rows.unsqueeze(1) * of_columns / whole.clamp(min=0.25)
            pattern = v.view(sizes).to(torch.promote_types(v.dtype, torch.float32))
            if share > 0:
                own_rows, own_columns = exact[number][rank].float().split(sizes)
                alike = outer(own_rows.unsqueeze(0), own_columns.unsqueeze(0)) * bias
                pattern = pattern ** (1.0 - share) * alike**share
            own_products = outer(rows[rank : rank + 1], columns[rank : rank + 1])
            scaled = pattern * torch.where(own_products > 0, mean_products / own_products, 1.0)
            v.copy_(torch.where(v.view(sizes) > 0, scaled, mean_products * bias).flatten())


def exchange_updates(
    own: list[Tensor],
    shared: Tensor,
    states: States,
    settings: Settings,
    share: float,
    decay: float,
    gain: Tensor,
    gain_of_all: float | None,
) -> tuple[Tensor, list[Tensor]]:
    """Exchange one tensor.

    Returns the mean, and each rank's sent part that counts; the unsent part decays in ``w``.
    """
    moved = [w - shared for w in own]  # a = w - S
    mean, sent, counted = exchange(moved, states, settings, share, gain, gain_of_all, True)  # m
    for (sender, _, _), state in states.items():
        state.residual = 0.0 if sender == "rank" else state.residual  # w keeps it
    for w, a, c in zip(own, moved, sent, strict=True):
        w.sub_((a - c).mul(1 - decay))
    return mean, counted


def train(
    weights: list[list[Tensor]],
    local_step: Callable[[int, int], list[Tensor] | None],
    steps: int,
    settings: Settings,
    is_scale_invariant: bool = True,
    kept: float = 1.0,
    plain_after: float = math.inf,
    memory: float | None = None,
    squares: Callable[[int], list[Tensor]] | None = None,
    shapes: Sequence[Sequence[int]] = (),
) -> tuple[list[Tensor], list[States]]:
    """Train ``weights[rank][tensor]`` in place.

    Returns the shared weights and the senders' states of each tensor.

    ``local_step(rank, step)`` is a step of a rank's optimizer, and returns its gradients. If that
    ``is_scale_invariant``, steps do not grow with gradients. ``squares(rank)`` are its ``v``, of
    which a step keeps the share ``memory``, as Adam does; without them steps are compared instead
    of gradients. Decay leaves ``kept`` of a weight. No mean has a gain after ``plain_after`` steps:
    90% of a long run. ``v`` is averaged after 1, 2, 4, ... 64 steps; the package goes on as often
    as 4% of the bytes allow, every 16 steps at most.
    """
    ranks = len(weights)
    all_states = [States(State) for _ in weights[0]]
    shared = [w.clone() for w in weights[0]]
    compared = [Compared(shape, memory) for shape in shapes or [w.shape for w in shared]]
    averaged = [[Averaged() for _ in shapes] for _ in range(ranks)]
    travelling: list[tuple[Tensor, list[Tensor]]] = []
    # Residuals that are kept apart from ``w``.
    apart = [[torch.zeros_like(w) for w in own] for own in weights]
    due = since_refresh = 0
    # Not if ranks are several steps apart, for which that is too long.
    has_gains = settings.local_steps == 1 and not settings.overlap_steps

    def arrive() -> None:
        for number, (mean, sent) in enumerate(travelling):
            shared[number].add_(mean)  # S = S + m
            for w, c in zip(weights, sent, strict=True):
                w[number].sub_(c).add_(mean)  # w = w - c + m
        travelling.clear()

    for step in range(1, steps + 1):
        refresh = since_refresh >= settings.refresh_every
        since_refresh += 1
        before = [[w.clone() for w in own] for own in weights]
        gradients = [local_step(rank, step - 1) for rank in range(ranks)]
        torch._foreach_mul_(shared, kept)  # as each rank's optimizer does with its own
        has_gain = is_scale_invariant and step <= plain_after
        if has_gain and has_gains and is_measured(step):
            for number, one in enumerate(compared):
                by_rank = [own[number] for own in gradients if own is not None]
                if memory is None:
                    pairs = zip(weights, before, strict=True)
                    by_rank = [own[number] - old[number] for own, old in pairs]
                one.measure(step, by_rank)
        if step == due:
            arrive()
        # Weights move fastest at first. So ranks exchange after every step, send as much less, and
        # residuals decay.
        length = settings.local_steps
        decay = 1.0
        if step <= settings.warmup_steps:
            given = settings.residual_decay
            usual = 0.95 - 0.5 * settings.density if is_scale_invariant else 0.95
            length = 1
            decay = usual if given is None else given
        if step % length or travelling:
            continue
        for own, residuals in zip(weights, apart, strict=True):
            for w, residual in zip(own, residuals, strict=True):
                w.add_(residual)
                residual.zero_()
        # Ranks that pull in opposite directions train on S, and then what is not sent stays whole.
        of_all = [one.coherence(ranks) for one in compared if one.of_all[1]]
        are_opposed = bool(of_all) and sum(of_all) / len(of_all) < 0.9
        holds_back = are_opposed and not settings.overlap_steps
        decay = 1.0 if holds_back else decay
        for number, (w_shared, states) in enumerate(zip(shared, all_states, strict=True)):
            for state in states.values() if refresh else ():
                state.target = 0
            own = [rank_weights[number] for rank_weights in weights]
            share = length / settings.local_steps
            gain = ONE
            gain_of_all: float | None = 1.0
            if has_gain and has_gains:
                gain = compared[number].gain(ranks, w_shared.dtype)
                if settings.density < 0.05 and not are_opposed:
                    gain_of_all = gain_of(compared, ranks)
            elif has_gain:
                gain_of_all = None
            travelling.append(
                exchange_updates(own, w_shared, states, settings, share, decay, gain, gain_of_all)
            )
        due = step + min(settings.overlap_steps, length)
        since_refresh = 1 if refresh else since_refresh
        if not settings.overlap_steps:
            arrive()
        if holds_back:
            for own, residuals in zip(weights, apart, strict=True):
                for w, residual, w_shared in zip(own, residuals, shared, strict=True):
                    residual.copy_(w - w_shared)
                    w.copy_(w_shared)
        made = range(step - length + 1, step + 1)
        is_due = any(one in made for one in (1, 2, 4, 8, 16, 32, 64))
        if is_due and squares is not None and memory is not None:
            squares_by_rank = [squares(rank) for rank in range(ranks)]
            average_squares(squares_by_rank, shapes, 1 - memory**step, averaged)
    arrive()
    for own, residuals in zip(weights, apart, strict=True):
        torch._foreach_add_(own, residuals)
    return shared, all_states


# 7. Embedding rows (embedding/messages.py). Each row ``E`` has an owner. The owner and the rank
#    that uses the row both keep the same copy ``R``, so they exchange only differences. One message
#    is for the rows that a rank requests.


def choose(
    news: list[Tensor], thresholds: list[float], capacity: int, form: str
) -> tuple[list[Tensor], list[int]]:
    """What one payload sends of some tensors, as receivers decode it, and how many entries reach
    each threshold.

    If more entries than ``capacity`` reach theirs, those that exceed it by the largest factor are
    sent, the first among equals. A tensor with infinite or NaN entries sends only those, so that
    all ranks see them.
    """
    excess = [torch.empty(0).double()]
    counts = []
    for a, threshold in zip(news, thresholds, strict=True):
        tau = torch.tensor(max(threshold, TINY), dtype=a.dtype)
        reached = a.abs() >= tau if bool(a.isfinite().all()) else ~a.isfinite()  # M
        excess.append(
            (a.abs().double() / tau).nan_to_num(nan=math.inf, posinf=math.inf).where(reached, -1.0)
        )
        counts.append(int(reached.sum()))
    largest = torch.cat(excess).argsort(descending=True, stable=True)[: min(capacity, sum(counts))]
    chosen = torch.zeros(sum(a.numel() for a in news), dtype=torch.bool).index_fill(
        0, largest, True
    )
    sent = [torch.zeros_like(a) for a in news]
    for a, mask, out in zip(news, chosen.split([a.numel() for a in news]), sent, strict=True):
        out[mask] = as_read(a[mask], form).to(a.dtype)
    return sent, counts


def send_rows(news: list[Tensor], thresholds: list[float], settings: Settings) -> list[Tensor]:
    """What one message sends.

    Each table has a threshold, changed in place; all tables share the capacity.
    """
    targets = [math.ceil(settings.density * a.numel() * (1 - 1e-12)) for a in news]
    for number, (a, target) in enumerate(zip(news, targets, strict=True)):
        thresholds[number] = (
            0.0 if target == a.numel() else thresholds[number] or exact_threshold(a, target)
        )
    sent, counts = choose(news, thresholds, sum(targets), settings.value_format)
    for number, (a, target, reached) in enumerate(zip(news, targets, counts, strict=True)):
        if settings.adapt_threshold and target < a.numel():
            again = reached > 2 * target and bool(a.isfinite().all())
            tau = thresholds[number]  # aims 5% high, because excess is cut to the largest
            thresholds[number] = (
                exact_threshold(a, target)
                if again
                else nudged(tau, a.numel(), reached, target, 1.05)
            )
    return sent


def look_up(
    rows: list[Tensor], copies: list[Tensor], thresholds: list[float], settings: Settings
) -> list[Tensor]:
    """Owner to user: the copies that both keep from now on, ``R + what is sent of E - R``."""
    news = [row - copy for row, copy in zip(rows, copies, strict=True)]
    return [
        copy + sent
        for copy, sent in zip(copies, send_rows(news, thresholds, settings), strict=True)
    ]


def return_gradients(
    gradients: list[Tensor], residuals: list[Tensor], thresholds: list[float], settings: Settings
) -> list[Tensor]:
    """User to owner: what is sent of ``G + dL/dR``.

    ``residuals``, the ``G``, change in place. Owners average it.
    """
    news = [left + gradient for left, gradient in zip(residuals, gradients, strict=True)]
    sent = send_rows(news, thresholds, settings)
    for number, (a, one) in enumerate(zip(news, sent, strict=True)):
        residuals[number] = torch.where((a - one).isfinite(), a - one, residuals[number])
    return sent
