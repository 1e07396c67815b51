"""Operations on whole tensors before and after an exchange on a CPU: the contract of its kernels,
in plain torch.

The tensors of a bucket are given as lists of flat tensors, of fp32 or fp64, which may lie anywhere
in memory, each without gaps. *Flags* say which entries are sent: one bit an entry, the first in the
lowest bit, in a uint8 tensor (:mod:`~lightning_dct.kernels.bits`). Tensor ``t`` has the flags from
number ``first[t]`` on. *Values* are those of the flagged entries, in their order.

All kernels give the same flags, values and sums to the last bit, so ranks may use different ones. A
mean of magnitudes is rounded from fp64 to fp32, which hides the order of the sum.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_dct.kernels.bits import nonzero_indices, pack_bits, unpack_bits

# Intermediate results stay in the processor's cache: several times faster than one operation after
# the other on all.
CHUNK = 1 << 17
# If not all entries that have reached a threshold fit, so many of them are looked at.
LIMIT_SAMPLE = 1 << 12
SMALLEST_THRESHOLD = torch.finfo(torch.float32).tiny
# Of a value in `2bit`: the largest scale of which twice is finite.
LARGEST_HALF = torch.finfo(torch.float32).max / 2

Tensors = Sequence[Tensor]
Numbers = Sequence[int]


class Sent(NamedTuple):
    """The parts of a bucket that some senders send, as receivers read them."""

    flags: Tensor  # shape `[senders, bytes]`, contiguous: the bucket's flags
    values: Tensor  # shape `[sum(counts)]`, fp32: those of one sender after the other
    counts: list[int]  # how many are of each sender


class Gains(NamedTuple):
    """The factors on the mean of each entry: that of its row times that of its column.

    Attributes:
        factors: Those of all rows and columns of all tensors, in the dtype of the totals: shape
            ``[n]``.
        places: For each tensor, where the factors of its rows begin, where those of its columns do,
            the width of a row, and the number of its first entry, if it is a piece: shape ``[4,
            tensors]``, int64, on the host.
    """

    factors: Tensor
    places: Tensor

    def of(self, tensor: int, entries: Tensor) -> Tensor:
        """The factors of some entries of a tensor, by number: shape ``[k]``."""
        rows, columns, width, first = self.places[:, tensor].tolist()
        entries = entries + first
        return self.factors[rows + entries // width] * self.factors[columns + entries % width]


def select(
    inputs: Tensors,
    references: Tensors,
    first: Numbers,
    thresholds: Sequence[float],
    scale: float | None,
    flags: Tensor,
) -> tuple[Tensor, list[int]]:
    """Flag the entries of ``a`` whose magnitude is not below the threshold of their tensor.

    Without a scale, ``a`` is ``new - base``, and both are left as they are. With one, ``a`` is
    ``base + scale * new``, product and sum each rounded once, and takes the place of ``base``,
    except where it is infinite or NaN. Infinite and NaN entries are always flagged. ``flags`` are
    zero before. ``inputs`` may have gaps.

    Returns:
        The flagged entries, not necessarily finite: shape ``[count]``, the dtype of the references,
        valid until the same thread selects again. And how many are in each tensor.
    """
    marks = torch.zeros(8 * flags.numel(), dtype=torch.bool, device=flags.device)
    found = [references[0][:0] if references else torch.empty(0, device=flags.device)]
    counts = []
    for new, base, begin, threshold in zip(inputs, references, first, thresholds, strict=True):
        count = 0
        chunk = CHUNK if base.is_cpu else max(base.numel(), 1)
        for start in range(0, base.numel(), chunk):
            ours = new[start : start + chunk]
            theirs = base[start : start + chunk]
            if scale is None:
                a = ours - theirs
            else:
                scaled = ours.to(theirs.dtype)
                a = theirs + (scaled if scale == 1.0 else scaled * scale)
            # "Not below" instead of "at or above", because it is true for NaN.
            if a.is_cpu:
                array = a.numpy()  # several times faster than torch
                mask = np.logical_not(np.abs(array) < array.dtype.type(threshold))
                reached = torch.from_numpy(mask)
                values = torch.from_numpy(array[mask])
            else:
                reached = (a.abs() < threshold).logical_not_()
                values = a[reached]
            if scale is not None:
                theirs.copy_(
                    a if bool(values.isfinite().all()) else torch.where(a.isfinite(), a, theirs)
                )
            marks[begin + start : begin + start + a.numel()] = reached
            found.append(values)
            count += values.numel()
        counts.append(count)
    flags.copy_(pack_bits(marks))
    return torch.cat(found), counts


def fit(
    flags: Tensor, first: Numbers, sizes: Numbers, values: Tensor, counts: Numbers, targets: Numbers
) -> tuple[Tensor, list[int], list[float]]:
    """Keep no more flags of each tensor than its target, in place, after ``counts`` have reached
    its threshold.

    If there are more, those that reach a limit are left, and if these are too many, a regular
    sample of them. If any is infinite or NaN, only such entries are left, because the step is lost
    anyway: the limit is infinite. ``values`` are those of all flagged entries, and may be
    overwritten.

    Returns:
        The remaining values, how many are in each tensor, and the limits; 0 for a tensor of which
        all are left.
    """
    marks = unpack_bits(flags, 8 * flags.numel()).view(torch.bool)
    kept = [values[:0]]
    limits = [0.0] * len(counts)
    parts = zip(first, sizes, values.split(list(counts)), targets, strict=True)
    for number, (begin, size, reached, target) in enumerate(parts):
        if not (finite := bool(reached.isfinite().all())) or reached.numel() > target:
            limits[number] = limit_of(reached, size, target) if finite else math.inf
            # "Not below" instead of "at or above", because it is true for NaN.
            large = (
                reached.abs() < torch.tensor(limits[number], dtype=reached.dtype)
            ).logical_not_()
            numbers = large.cumsum(0)
            count = int(large.sum())
            if count > target:
                large &= numbers * target // count > (numbers - 1) * target // count
            of_tensor = marks[begin : begin + size]
            of_tensor[of_tensor.clone()] = large
            reached = reached[large]
        kept.append(reached)
    flags.copy_(pack_bits(marks))
    return torch.cat(kept), list(map(len, kept[1:])), limits


def limit_of(reached: Tensor, size: int, target: int) -> float:
    """The magnitude that about ``target`` of the entries reach that have reached a threshold, from
    a regular sample.

    ``reached`` are their values, finite, shape ``[n]`` with ``n > target``, out of a tensor's
    ``size``. With a random choice instead of the largest entries, four ranks lost 7.0% where they
    lose 5.1%: ``docs/history/defaults.md``.
    """
    count = reached.numel()
    wanted = min(LIMIT_SAMPLE, size)
    sampled = np.abs(reached.numpy()[np.arange(wanted) * count // wanted])
    index = wanted - -(-wanted * target // count)
    return max(float(np.partition(sampled, index)[index]), SMALLEST_THRESHOLD)


def subtract(tensors: Tensors, first: Numbers, sent: Sent) -> None:
    """Subtract what one sender sends, except where the difference is infinite or NaN."""
    for tensor, (places, values) in zip(tensors, _by_tensor(tensors, first, sent)[0], strict=True):
        left = tensor[places] - values
        finite = left.isfinite()
        tensor[places[finite]] = left[finite]


def decay(inputs: Tensors, references: Tensors, first: Numbers, sent: Sent, dropped: float) -> None:
    """Take the share ``dropped`` of what one sender does not send, ``new - base - sent``, from
    ``inputs``.
    """
    for new, base, (places, values) in zip(
        inputs, references, _by_tensor(inputs, first, sent)[0], strict=True
    ):
        left = new - base
        left[places] -= values
        new.sub_(left.mul_(dropped))


def add_sums(
    totals: Tensors,
    owns: Tensors | None,
    first: Numbers,
    sent: Sent,
    weights: Tensor,
    mine: int = -1,
    gains: Gains | None = None,
) -> None:
    """Add ``weights[n]`` times the sum of what senders send, in their order; with gains, times that
    of each entry.

    ``n`` counts the senders of a value other than zero. ``weights`` starts at ``n = 0`` and has the
    dtype of the totals. So the values of ``len(weights) - 1`` senders are summed; another sender
    may follow. The same is added to ``owns``, after the values of sender number ``mine`` were
    subtracted from them (-1: nothing). Of a sender that is not summed, only entries count whose sum
    is not zero.
    """
    of_senders = _by_tensor(totals, first, sent)
    for number, total in enumerate(totals):
        sums = torch.zeros_like(total)
        counts = torch.zeros(total.numel(), dtype=torch.int64)
        union = torch.zeros(total.numel(), dtype=torch.bool)
        for by_tensor in of_senders[: len(weights) - 1]:
            places, values = by_tensor[number]
            sums[places] += values
            counts[places] += values != 0
            union[places] = True
        where = union.nonzero().squeeze(1)
        mean = sums[where] * weights[counts[where]]
        if gains is not None:
            mean *= gains.of(number, where)
        total[where] += mean
        if owns is not None:
            if mine >= 0:
                places, values = of_senders[mine][number]
                counted = sums[places] != 0 if mine >= len(weights) - 1 else slice(None)
                owns[number][places[counted]] -= values[counted]
            owns[number][where] += mean


def select_rows(
    rows: Tensor,
    at: Tensor,
    new: Tensor,
    new_at: Tensor,
    lengths: Numbers,
    thresholds: Sequence[float],
    scale: float,
    is_kept: bool,
    flags: Tensor,
) -> tuple[Tensor, list[int]]:
    """As :func:`select` with a scale, of the rows ``rows[at]`` and ``new[new_at]``, one after the
    other.

    ``rows`` and ``new`` have shapes ``[n, dim]`` and one dtype, the rows of each without gaps;
    ``at`` and ``new_at`` shape ``[k]``, int64. ``lengths`` are the numbers of rows of each
    tensor. If ``is_kept``, sums take the place of ``rows``, except where they are infinite or
    NaN; then ``at`` are distinct.
    """
    sums = rows.index_select(0, at)
    sizes = [length * sums.shape[1] for length in lengths]
    values, counts = select(
        new.index_select(0, new_at).view(-1).split(sizes),
        sums.view(-1).split(sizes),
        list(accumulate(sizes, initial=0))[:-1],
        thresholds,
        scale,
        flags,
    )
    if is_kept:
        rows.numpy()[at.numpy()] = sums.numpy()  # several times faster than torch
    return values, counts


def add_flagged(rows: Tensor, at: Tensor, flags: Tensor, values: Tensor) -> None:
    """Add values to the flagged entries of the rows ``rows[at]``, one after the other, which are
    distinct.
    """
    entries = _entries(rows, at, flags, values.numel())
    rows.view(-1).index_add_(0, entries, values.to(rows.dtype))


def keep_rest(rows: Tensor, at: Tensor, flags: Tensor, values: Tensor, sent: Tensor) -> None:
    """Put what is left of values, less what was sent of them, into the flagged entries of the rows
    ``rows[at]``, except where it is infinite or NaN.
    """
    entries = _entries(rows, at, flags, values.numel())
    left = values - sent.to(values.dtype)
    finite = left.isfinite()
    rows.view(-1).index_copy_(0, entries[finite], left[finite].to(rows.dtype))


def unflag(flags: Tensor, keep: Tensor) -> None:
    """Keep those of the flags that are set, one after the other, that ``keep`` (bool, ``[count]``)
    says.
    """
    marks = unpack_bits(flags, 8 * flags.numel())
    marks[nonzero_indices(marks)[~keep]] = 0
    flags.copy_(pack_bits(marks))


def _entries(rows: Tensor, at: Tensor, flags: Tensor, count: int) -> Tensor:
    """Where the flagged entries of the rows ``rows[at]`` are in all rows, flattened."""
    dim = rows.shape[1]
    positions = nonzero_indices(unpack_bits(flags, 8 * flags.numel()))[:count]
    row = positions // dim
    return positions + (at.index_select(0, row) - row) * dim


def rows_of_flags(flags: Tensor, values: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The numbers of the rows that have flagged entries, ascending, int64 ``[n]``, and these rows,
    ``[n, dim]``: the values, and zeros elsewhere.
    """
    positions = nonzero_indices(unpack_bits(flags, 8 * flags.numel()))[: values.numel()]
    touched, number = torch.unique_consecutive(positions // dim, return_inverse=True)
    rows = values.new_zeros(touched.numel(), dim)
    rows.view(-1).index_copy_(0, number * dim + positions % dim, values)
    return touched, rows


def _by_tensor(tensors: Tensors, first: Numbers, sent: Sent) -> list[list[tuple[Tensor, Tensor]]]:
    """For each sender, for each tensor: where its flags are set, and the values there in its
    dtype.
    """
    found: list[list[tuple[Tensor, Tensor]]] = []
    for flags, values in zip(sent.flags, sent.values.split(sent.counts), strict=True):
        marks = unpack_bits(flags, 8 * flags.numel())
        end = 0
        cursor = 0
        found.append([])
        for tensor, begin in zip(tensors, first, strict=True):
            cursor += int(marks[end:begin].count_nonzero())
            end = begin + tensor.numel()
            places = nonzero_indices(marks[begin:end])
            found[-1].append((places, values[cursor : cursor + places.numel()].to(tensor.dtype)))
            cursor += places.numel()
    return found
