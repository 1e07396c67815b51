"""Operations on whole tensors before and after an exchange on a CPU: the contract of its kernels, in plain torch.

The tensors of a bucket are given as lists of flat tensors, of fp32 or fp64, which may lie anywhere in memory. *Flags*
say which entries are sent: one bit an entry, the first in the lowest bit, in a uint8 tensor
(:mod:`~lightning_dct.kernels.bits`). Tensor ``t`` has the flags from number ``first[t]`` on. *Values* are those of the
flagged entries, in their order.

All kernels give the same flags, values and sums to the last bit, so ranks may use different ones. A mean of magnitudes
is rounded from fp64 to fp32, which hides the order of the sum.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_dct.kernels.bits import nonzero_indices, pack_bits, unpack_bits

# Intermediate results stay in the processor's cache: several times faster than one operation after the other on all.
CHUNK = 1 << 17

Tensors = Sequence[Tensor]


class Sent(NamedTuple):
    """The parts of a bucket that some senders send, as receivers read them."""

    flags: Tensor  # shape `[senders, bytes]`, contiguous: the bucket's flags
    values: Tensor  # shape `[sum(counts)]`, fp32: those of one sender after the other
    counts: list[int]  # how many are of each sender


def select(
    news: Tensors, bases: Tensors, first: Sequence[int], thresholds: Sequence[float], scale: float | None, flags: Tensor
) -> tuple[Tensor, list[int]]:
    """Flag the entries of ``a`` whose magnitude is not below the threshold of their tensor.

    Without a scale, ``a`` is ``new - base``, and both are left as they are. With one, ``a`` is ``base + scale * new``,
    product and sum each rounded once, and takes the place of ``base``, except where it is infinite or NaN. Infinite and
    NaN entries are always flagged. ``flags`` are zero before.

    Returns:
        The flagged entries, not necessarily finite: shape ``[count]``, the dtype of the bases, valid until the same
        thread selects again. And how many are in each tensor.
    """
    marks = torch.zeros(8 * flags.numel(), dtype=torch.bool, device=flags.device)
    found, counts = [bases[0][:0] if bases else torch.empty(0, device=flags.device)], []
    for new, base, begin, threshold in zip(news, bases, first, thresholds, strict=True):
        count, chunk = 0, CHUNK if base.is_cpu else max(base.numel(), 1)
        for start in range(0, base.numel(), chunk):
            ours, theirs = new[start : start + chunk], base[start : start + chunk]
            if scale is None:
                a = ours - theirs
            else:
                scaled = ours.to(theirs.dtype)
                a = theirs + (scaled if scale == 1.0 else scaled * scale)
            # "Not below" instead of "at or above", because it is true for NaN.
            if a.is_cpu:
                array = a.numpy()  # several times faster than torch
                mask = np.logical_not(np.abs(array) < array.dtype.type(threshold))
                reached, values = torch.from_numpy(mask), torch.from_numpy(array[mask])
            else:
                reached = (a.abs() < threshold).logical_not_()
                values = a[reached]
            if scale is not None:
                theirs.copy_(a if bool(values.isfinite().all()) else torch.where(a.isfinite(), a, theirs))
            marks[begin + start : begin + start + a.numel()] = reached
            found.append(values)
            count += values.numel()
        counts.append(count)
    flags.copy_(pack_bits(marks))
    return torch.cat(found), counts


def thin(flags: Tensor, begin: int, size: int, values: Tensor, target: int, limit: float) -> Tensor:
    """Keep the flags of a tensor's entries that reach a limit; of more than ``target``, a regular sample; in place.

    ``values`` are those of all its flagged entries, and may be overwritten. The result has the remaining ones.
    """
    # "Not below" instead of "at or above", because it is true for NaN.
    large = (values.abs() < torch.tensor(limit, dtype=values.dtype)).logical_not_()
    numbers, count = large.cumsum(0), int(large.sum())
    if count > target:
        large &= numbers * target // count > (numbers - 1) * target // count
    marks = unpack_bits(flags, 8 * flags.numel()).view(torch.bool)
    of_tensor = marks[begin : begin + size]
    of_tensor[of_tensor.clone()] = large
    flags.copy_(pack_bits(marks))
    return values[large]


def subtract(tensors: Tensors, first: Sequence[int], sent: Sent) -> None:
    """Subtract what one sender sends, except where the difference is infinite or NaN."""
    for tensor, (places, values) in zip(tensors, _by_tensor(tensors, first, sent)[0], strict=True):
        left = tensor[places] - values
        finite = left.isfinite()
        tensor[places[finite]] = left[finite]


def decay(news: Tensors, bases: Tensors, first: Sequence[int], sent: Sent, lost: float) -> None:
    """Take the share ``lost`` of what one sender does not send, ``new - base - sent``, from ``news``."""
    for new, base, (places, values) in zip(news, bases, _by_tensor(news, first, sent)[0], strict=True):
        left = new - base
        left[places] -= values
        new.sub_(left.mul_(lost))


def add_sums(
    totals: Tensors, owns: Tensors | None, first: Sequence[int], sent: Sent, weights: Tensor, mine: int = -1
) -> None:
    """Add ``weights[n]`` times the sum of what senders send, in their order.

    ``n`` counts the senders of a value other than zero. ``weights`` starts at ``n = 0`` and has the dtype of the
    totals. So the values of ``len(weights) - 1`` senders are summed; another sender may follow. The same is added to
    ``owns``, after the values of sender number ``mine`` were subtracted from them (-1: nothing). Of a sender that is
    not summed, only entries count whose sum is not zero.
    """
    of_senders = _by_tensor(totals, first, sent)
    for number, total in enumerate(totals):
        sums, counts = torch.zeros_like(total), torch.zeros(total.numel(), dtype=torch.int64)
        union = torch.zeros(total.numel(), dtype=torch.bool)
        for by_tensor in of_senders[: len(weights) - 1]:
            places, values = by_tensor[number]
            sums[places] += values
            counts[places] += values != 0
            union[places] = True
        where = union.nonzero().squeeze(1)
        mean = sums[where] * weights[counts[where]]
        total[where] += mean
        if owns is not None:
            if mine >= 0:
                places, values = of_senders[mine][number]
                counted = sums[places] != 0 if mine >= len(weights) - 1 else slice(None)
                owns[number][places[counted]] -= values[counted]
            owns[number][where] += mean


def _by_tensor(tensors: Tensors, first: Sequence[int], sent: Sent) -> list[list[tuple[Tensor, Tensor]]]:
    """For each sender, for each tensor: where its flags are set, and the values there in its dtype."""
    found: list[list[tuple[Tensor, Tensor]]] = []
    for flags, values in zip(sent.flags, sent.values.split(sent.counts), strict=True):
        marks, end, cursor = unpack_bits(flags, 8 * flags.numel()), 0, 0
        found.append([])
        for tensor, begin in zip(tensors, first, strict=True):
            cursor += int(marks[end:begin].count_nonzero())
            end = begin + tensor.numel()
            places = nonzero_indices(marks[begin:end])
            found[-1].append((places, values[cursor : cursor + places.numel()].to(tensor.dtype)))
            cursor += places.numel()
    return found
