r"""How far the ranks' gradients agree, by row and column of each tensor, and the gain on the mean
of their updates.

The *coherence* of ``W`` vectors ``g_r`` is the number of them that one of the same direction would
stand for:

    R  =  |sum over ranks of g|^2 / sum over ranks of |g|^2  =  1 + (W - 1) c

It is ``W`` if all are alike, 1 if they are noise, and less if they are opposed; ``c`` is their mean
cosine. Adam divides by the root of ``v``, a running mean of squares. On the mean gradient, as under
DistributedDataParallel, it would divide by the root of a ``v`` that is smaller by ``R / W``. So the
mean of the ranks' updates is multiplied by the *gain*

    f  =  sqrt(W / R)

with the squares of ``R`` averaged over time as the optimizer averages them. ``R`` differs within a
tensor: the rows of frequent words agree, those of rare ones do not. Like the second moments of
Adafactor it is taken from those of rows and columns, ``R_ij = R_i R_j / R``. A tensor of one
dimension has one ``R``. If an optimizer keeps no squares of gradients, as Lion and Muon, its steps
of the last few measurements take the place of gradients, so the mean gets as long as the steps are.

If few entries are sent, they wait long, and a rank goes by what it has moved itself. Then one gain
for all tensors, from their squares together, trains better over long runs. It is at most ``W / n``
for an entry that ``n`` ranks have sent, so that none goes further than its senders have moved it.

Ranks measure now and then, from about one entry of each row.

Sources: radial-directional averaging of Decoupled DiLoCo (arXiv 2604.21428), which has an ``f`` of
each tensor; Adafactor (Shazeer and Stern, ICML 2018) for rows and columns.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dct.compress.awaited import Awaited
from lightning_dct.compress.bucket_plan import Gain
from lightning_dct.exchange.collectives import Link, all_gather_payload

# A sample has one entry in so many, or in each row if it is longer, but at least so many of a
# tensor, and at most.
STRIDE = 64
FEWEST = 16
MOST = 1 << 16
# Measured in every step at first, when coherence changes fast, and then once in so many steps.
OFTEN = 4
SELDOM = 16
EARLY = 64
# The weight of a measurement in a running mean of the last few.
USUAL_WEIGHT = 0.25
# Noise of a measurement must not make a mean of opposed steps too long.
LEAST = 0.25
# Ranks whose coherence is less, in the mean over tensors, pull in opposite directions.
OPPOSED = 0.9
# The coherence of the whole tensor counts as so many samples of a row or a column.
PRIOR = 1.0
# The gain of all tensors changes in parts of so many, because weights by senders are kept by it.
GAIN_UNITS = 64
# Of the factor of a column, and its inverse.
MOST_OF_COLUMN = 2.0


class Sample(NamedTuple):
    """What is compared of a tensor in one step.

    Attributes:
        entries: Those of its entries that :func:`places_of` says, fp32: shape ``[k]``.
        shape: The rows and columns of the tensor; one row for a tensor of one dimension.
        memory: What remains in a step of the optimizer's running mean of squares; None if it keeps
            none.
    """

    entries: Tensor
    shape: tuple[int, int]
    memory: float | None = None


class TensorCoherence:
    """The coherence of one tensor among ``ranks``: running means of squares, fp64 on the host,
    alike on all ranks.

    Attributes:
        rows: For each row the squares of sums over ranks, the sums of squares, and the number of
            samples: shape ``[3, rows]``.
        columns: The same of columns; of a tensor of one dimension they stay zero.
        whole: Squares of sums over ranks and sums of squares of all samples, and the latter of the
            last few measurements: shape ``[4]``.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.rows = torch.zeros(3, shape[0], dtype=torch.float64)
        self.columns = torch.zeros(3, shape[1] if shape[0] > 1 else 0, dtype=torch.float64)
        self.whole = torch.zeros(4, dtype=torch.float64)

    @property
    def parts(self) -> list[Tensor]:
        """Everything that is saved."""
        return [self.rows, self.columns, self.whole]

    def add(self, places: Tensor, of_sums: Tensor, sums: Tensor, weight: float) -> None:
        """Add a measurement: the squares of sums over ranks, and sums of squares, of the entries at
        some places.
        """
        squares = of_sums, sums
        if self.shape[0] > 1:
            numbers = places // self.shape[1], places % self.shape[1]
            for known, number in zip((self.rows, self.columns), numbers, strict=True):
                size = known.shape[1]
                for total, values in zip(known[:2], squares, strict=True):
                    total.mul_(1 - weight).add_(torch.bincount(number, values, size).mul_(weight))
                known[2].add_(torch.bincount(number, minlength=size))
        # One after the other, because the order of a sum must not depend on the processor.
        whole = torch.cat(
            [torch.bincount(torch.zeros_like(places), values, 1) for values in squares]
        )
        self.whole[:2].mul_(1 - weight).add_(whole * weight)
        self.whole[2:].mul_(1 - USUAL_WEIGHT).add_(whole * USUAL_WEIGHT)

    def of_whole(self, ranks: int) -> float:
        """The coherence of the whole tensor, with the optimizer's memory."""
        return _ratio(self.whole[0], self.whole[1], ranks)

    def present(self, ranks: int) -> float:
        """The coherence of the whole tensor in the last few measurements."""
        return _ratio(self.whole[2], self.whole[3], ranks)

    def gain(self, ranks: int) -> Gain:
        """The factors on the mean of so many ranks' updates."""
        whole = self.of_whole(ranks)
        if self.shape[0] == 1:
            rows = torch.full((self.shape[1],), math.sqrt(ranks / whole), dtype=torch.float64)
            return Gain(rows, torch.ones(1, dtype=torch.float64))
        rows = (ranks / self._shrunk(self.rows, whole, ranks)).sqrt()
        columns = (whole / self._shrunk(self.columns, whole, ranks)).sqrt()
        return Gain(rows, columns.clamp_(1 / MOST_OF_COLUMN, MOST_OF_COLUMN))

    @staticmethod
    def _shrunk(known: Tensor, whole: float, ranks: int) -> Tensor:
        """The coherence of rows or columns; those with few samples are near that of the whole
        tensor.
        """
        of_sums, sums, count = known
        own = torch.where(sums > 0, of_sums / sums, whole)
        return ((own * count + PRIOR * whole) / (count + PRIOR)).clamp_(LEAST, ranks)


def _ratio(of_sums: Tensor, sums: Tensor, ranks: int) -> float:
    return min(max(float(of_sums / sums), LEAST), float(ranks)) if sums > 0 else float(ranks)


class Coherence:
    """The coherence of the tensors of one optimizer: the same on all ranks and devices.

    Attributes:
        tensors: What is known, by parameter.
        measured: The latest measurement by parameter: its step, and the results of
            :func:`measure_all`. It counts from the next one on, because by then every rank knows
            it.
        mean: The coherence of all tensors, each counting as much; None while nothing is known.
        gain_of_all: The gain on the mean of all tensors together, at least 1.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, TensorCoherence] = {}
        self.measured: dict[str, tuple[int, float, Tensor]] = {}
        self.mean: float | None = None
        self.gain_of_all = 1.0
        self._is_awaited = False
        # The step that has begun and is not measured yet, and samples of weights before it.
        self._begun = 0
        self._before: dict[str, Tensor] = {}
        self._gains: Mapping[str, Gain] = MappingProxyType({})

    def has_begun(self, step: int) -> bool:
        """Whether :meth:`begin` was called for this step and it has not been measured yet."""
        return self._begun == step

    def begin(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Sample weights whose step will be compared, before optimizer step number ``step`` (from 1
        on).
        """
        self._begun = step
        self._before = {name: sample_of(own, step).clone() for name, own in weights.items()}

    def skip(self) -> None:
        """Leave a step that has begun unmeasured, because other weights take part now."""
        self._begun = 0

    def moved(self, name: str, weights: Tensor) -> Tensor | None:
        """The sample of a parameter's step, which has begun; None if :meth:`begin` has not sampled
        it.
        """
        before = self._before.get(name)
        return None if before is None else sample_of(weights, self._begun) - before

    def sample(
        self, name: str, weights: Tensor, gradient: Tensor | None, memory: float | None
    ) -> Sample:
        """What is compared of a parameter in the step that has begun: its step, if :meth:`begin`
        has sampled it.

        Otherwise that is its gradient, which may be sparse; None stands for zeros.
        """
        entries = self.moved(name, weights)
        if entries is None and gradient is not None:
            entries = sample_of_gradient(gradient, self._begun)
        elif entries is None:
            entries = torch.zeros_like(sample_of(weights, self._begun))
        return Sample(entries.float(), shape_of(weights), memory)

    def measure(self, samples: Mapping[str, Sample], everyone: Link, awaited: Awaited) -> None:
        """Measure from this rank's samples by parameter, of the step that has begun; a collective
        call.
        """
        step = self._begun
        self._begun = 0
        self._before = {}
        if self._is_awaited:
            awaited.synchronize()
        self._use_measured(everyone.size)
        self._is_awaited = True
        for name, sample in samples.items():
            if name not in self.tensors or self.tensors[name].shape != sample.shape:
                self.tensors[name] = TensorCoherence(sample.shape)
        weights = {name: weight_of(step, sample.memory) for name, sample in samples.items()}
        sizes = [sample.entries.numel() for sample in samples.values()]
        found = measure_all([sample.entries for sample in samples.values()], everyone)

        def take(numbers: list[int]) -> None:
            self._is_awaited = False
            results = (
                torch.tensor(numbers, dtype=torch.int64)
                .view(torch.float64)
                .view(2, -1)
                .split(sizes, dim=1)
            )
            self.measured = {
                name: (step, weight, result)
                for (name, weight), result in zip(weights.items(), results, strict=True)
                if bool(result.isfinite().all()) and bool(result.any())
            }

        awaited.on_ready(found.flatten().view(torch.int64), take)

    def _use_measured(self, ranks: int) -> None:
        for name, (step, weight, result) in self.measured.items():
            known = self.tensors[name]
            start, stride = places_of(known.shape, step)
            places = torch.arange(start, known.shape[0] * known.shape[1], stride)
            of_sums, sums = result
            known.add(places, of_sums, sums, weight)
        if self.measured:
            self._know(ranks)
        self.measured = {}

    def gains(self) -> Mapping[str, Gain]:
        """The factors on the mean of updates by parameter; the same object until they change."""
        return self._gains

    @property
    def are_opposed(self) -> bool:
        """Whether the ranks' gradients cancel each other, which those of ranks with the same data
        do not.
        """
        return self.mean is not None and self.mean < OPPOSED

    def _know(self, ranks: int) -> None:
        """Take what has been measured into gains, and into the mean."""
        self._gains = {
            name: known.gain(ranks) for name, known in self.tensors.items() if bool(known.whole[1])
        }
        of_all = [self.tensors[name].of_whole(ranks) for name in self._gains]
        self.mean = sum(of_all) / len(of_all) if of_all else None
        of_sums, sums = (
            sum(float(self.tensors[name].whole[part]) for name in self._gains) for part in (0, 1)
        )
        if sums > 0:
            coherence = min(max(of_sums / sums, 1.0), float(ranks))
            self.gain_of_all = round(math.sqrt(ranks / coherence) * GAIN_UNITS) / GAIN_UNITS

    def load(self, tensors: Mapping[str, TensorCoherence], ranks: int) -> None:
        """Continue with what is known of so many ranks."""
        self.tensors = dict(tensors)
        self._know(ranks)


def is_measured(step: int) -> bool:
    """Whether coherence is measured in an optimizer step (from 1 on)."""
    return step <= SELDOM or step % (OFTEN if step <= EARLY else SELDOM) == 0


def weight_of(step: int, memory: float | None) -> float:
    """The weight of a measurement in a running mean that keeps ``memory`` of itself in each step,
    from zero on.
    """
    if memory is None:
        return 1.0 if step == 1 else USUAL_WEIGHT
    steps = next((step - before for before in range(step - 1, 0, -1) if is_measured(before)), step)
    weight = steps / step if memory >= 1.0 else (1.0 - memory**steps) / (1.0 - memory**step)
    # One measurement is noise, however short the optimizer's memory is.
    return min(weight, max(USUAL_WEIGHT, steps / step))


def shape_of(tensor: Tensor) -> tuple[int, int]:
    """The rows and columns of a tensor of real numbers; one of fewer than two dimensions is a
    single row.
    """
    if tensor.dim() < 2 or not tensor.numel():
        return 1, tensor.numel()
    return tensor.shape[0], tensor.numel() // tensor.shape[0]


def places_of(shape: tuple[int, int], step: int) -> tuple[int, int]:
    """The first sampled entry of a tensor, and the distance between two, which takes all columns in
    turn.
    """
    size = shape[0] * shape[1]
    width = shape[1] if shape[0] > 1 else 1
    stride = min(max(STRIDE, width, size // MOST), max(size // FEWEST, 1))
    while math.gcd(stride, width) > 1:
        stride += 1
    return 7919 * (step + step // SELDOM) % stride, stride


def sample_of(tensor: Tensor, step: int) -> Tensor:
    """Some entries of a tensor of real numbers, others in another step: shape ``[k]``."""
    start, stride = places_of(shape_of(tensor), step)
    return tensor.detach().reshape(-1)[start::stride]


def sample_of_gradient(gradient: Tensor, step: int) -> Tensor:
    """As :func:`sample_of`, of a gradient that may be sparse."""
    if not gradient.is_sparse:
        return sample_of(gradient, step)
    if gradient.sparse_dim() != 1 or gradient.dim() < 2:
        return sample_of(gradient.to_dense(), step)
    gradient = gradient.coalesce()
    rows = gradient.indices()[0]
    values = gradient.values()
    width = gradient.numel() // max(gradient.shape[0], 1)
    start, stride = places_of((gradient.shape[0], width), step)
    places = torch.arange(start, gradient.numel(), stride, device=values.device)
    if not len(rows):
        return values.new_zeros(len(places))
    wanted = places // width
    found = torch.searchsorted(rows, wanted).clamp_(max=len(rows) - 1)
    there = values.reshape(len(rows), width)[found, places % width]
    return torch.where(rows[found] == wanted, there, 0.0)


def measure_all(samples: Sequence[Tensor], everyone: Link) -> Tensor:
    """The square of the sum over ranks of each sampled entry, and the sum of squares: shape ``[2,
    k]``, fp64.

    All ranks add in the same order, so they find the same bits. This is a collective call.
    """
    # Half the bytes; rounding errors are far below the noise of a sample.
    rounded = torch.cat([sample.reshape(-1) for sample in samples]).to(torch.bfloat16)
    if not rounded.numel():  # shards of these ranks are all empty
        return torch.zeros(2, 0, dtype=torch.float64, device=rounded.device)
    work, gathered = all_gather_payload(rounded.view(torch.uint8), everyone)
    work.wait()
    return squares_over_ranks(list(gathered.view(everyone.size, -1).view(torch.bfloat16)))


def squares_over_ranks(samples: Sequence[Tensor]) -> Tensor:
    """As :func:`measure_all`, from the samples of all ranks, bf16: shape ``[k]`` each."""
    total = torch.zeros_like(samples[0], dtype=torch.float64)
    squares = torch.zeros_like(total)
    for sample in samples:
        total += sample
        squares += sample.double().square()
    return torch.stack([total.square(), squares])


def coherence_of_all(steps: Tensor) -> float | None:
    """The coherence of the samples of all ranks, shape ``[ranks, k]``, fp32; None if it is not
    defined.
    """
    steps = steps.double()
    ratio = float(steps.sum(0).square().sum() / steps.square().sum())
    return min(max(ratio, LEAST), float(len(steps))) if math.isfinite(ratio) else None
