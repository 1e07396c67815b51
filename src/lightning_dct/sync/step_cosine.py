r"""How alike the ranks' optimizer steps are, from a sample, and how much longer their mean is made.

The mean of ``W`` steps ``q`` of about the same length, whose mean cosine is ``c``, is shorter than they are:

    |mean of q|  =  |q| sqrt((1 + (W - 1) c) / W)

An optimizer that divides by the size of gradients, such as Adam, has chosen the length of its steps. To have it,
the mean of what ranks exchange after every step is multiplied by ``f = sqrt(W / (1 + (W - 1) c))``: 1 if all ranks step
alike, and ``sqrt(W)`` if what they do is noise.

The cosine changes slowly. So ranks measure it now and then, and on a thousand entries of the model or fewer:

    c  =  (|sum over ranks of q|^2 / sum over ranks of |q|^2  -  1) / (W - 1)

Source: radial-directional averaging of Decoupled DiLoCo (arXiv 2604.21428), which takes the ``f`` of each tensor.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dct.compress.awaited import Awaited
from lightning_dct.exchange.collectives import Link, all_reduce_mean

# Cosines are rounded to multiples of 1 / WHOLE, so that all ranks and devices use the same number.
WHOLE = 1024
# Entries of a sample. That of a small model has one entry in 64, because it would cost a large part of its bytes.
ENTRIES = 1024
SMALLEST_STRIDE = 64
EVERY = 16


class StepCosine:
    """The mean cosine between the ranks' steps of one optimizer: the same number on all ranks, whatever their device.

    Attributes:
        value: In parts of ``WHOLE``; at first as if the steps were the same.
        measured: The latest measurement. It counts from the next one on, because by then every rank knows it. None if
            there is none, or if it is not known yet.
    """

    def __init__(self) -> None:
        self.value = WHOLE
        self.measured: int | None = None
        self._is_awaited = False
        # The step that has been sampled before it was made, and the sample.
        self._begun = 0
        self._before = torch.empty(0)

    def has_begun(self, step: int) -> bool:
        """Whether :meth:`begin` has sampled this step and it has not been measured yet."""
        return self._begun == step

    def begin(self, step: int, weights: Sequence[Tensor]) -> None:
        """Sample this rank's weights before an optimizer step (from 1 on) in which the cosine is measured."""
        self._begun, self._before = step, sample_of(weights, step)

    def skip(self) -> None:
        """Leave a step that has begun unmeasured, because other weights take part now."""
        self._begun = 0

    def measure(self, step: int, weights: Sequence[Tensor], everyone: Link, awaited: Awaited) -> None:
        """Measure after a step that has begun; a collective call."""
        if self._is_awaited:
            awaited.synchronize()
        if self.measured is not None:
            self.value, self.measured = (self.value + self.measured) // 2, None
        self._is_awaited = True
        awaited.on_ready(cosine_of(self.sampled(step, weights), everyone), self._take)

    def sampled(self, step: int, weights: Sequence[Tensor]) -> Tensor:
        """The sample of this rank's step, which has begun: shape ``[k]``, fp32."""
        self._begun = 0
        return sample_of(weights, step).sub_(self._before)

    def _take(self, numbers: list[int]) -> None:
        self.measured, self._is_awaited = numbers[0] if numbers[0] >= 0 else None, False

    def lengthening(self, ranks: int) -> float:
        """The factor on the mean of so many ranks' steps, from 1 to ``sqrt(ranks)``."""
        return math.sqrt(ranks / (1.0 + (ranks - 1) * self.value / WHOLE))


def is_measured(step: int) -> bool:
    """Whether the cosine is measured in an optimizer step (from 1 on): more often at first, when it changes fast."""
    return step % EVERY == 0 or step in (1, 2, 4, 8)


def sample_of(weights: Sequence[Tensor], step: int) -> Tensor:
    """Some entries of weights, others at another step: shape ``[k]``, fp32, in memory of their own."""
    stride = max(SMALLEST_STRIDE, sum(tensor.numel() for tensor in weights) // ENTRIES)
    parts = [tensor.detach().reshape(-1) for tensor in weights if tensor.numel()]
    first = 7919 * (step + step // EVERY)
    parts = [part[first % min(stride, part.numel()) :: stride].float() for part in parts]
    # A rank whose shards are all empty has no sample, and takes part.
    return torch.cat(parts) if parts else torch.empty(0, device=weights[0].device)


def cosine_of(step: Tensor, everyone: Link) -> Tensor:
    """The mean cosine between the ranks' steps, in parts of ``WHOLE``: shape ``[1]``, int64; a collective call.

    ``step``, shape ``[k]``, fp32, has the same entries of the step of each rank. The result is -1 if no rank has moved,
    or one to infinity.
    """
    means = torch.cat([step, step.square().sum().view(1)])
    all_reduce_mean(means, everyone).wait()
    mean, square = means.double().split([step.numel(), 1])
    return _cosine_of_mean(mean, square, everyone.size)


def cosine_of_all(steps: Tensor) -> int:
    """The mean cosine, from the samples of all ranks, shape ``[ranks, k]``, fp32; no collective call."""
    steps = steps.double()
    return int(_cosine_of_mean(steps.mean(0), steps.square().sum(1).mean(), len(steps)))


def _cosine_of_mean(mean: Tensor, square: Tensor, ranks: int) -> Tensor:
    cosine = (ranks * mean.square().sum() / square - 1.0) / (ranks - 1)
    return cosine.clamp(0.0, 1.0).mul_(WHOLE).round_().nan_to_num_(nan=-1.0).long()
