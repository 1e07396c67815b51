"""Select and compact on a CUDA GPU, compiled by triton, which comes with CUDA builds of torch.

Two launches. The first reads gradient and residual, writes their sum and counts each block's picks: the traffic of
``torch.add(gradient, residual, out=residual)``. The second reads the residual once more, a third on top, and writes the
picks to where a running sum of the counts says they belong, so their order is ascending without a sort. Neither waits
for the host; only :func:`select` does, once, because its result has as many entries as were picked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dct.kernels.selection import Selection, nothing

BLOCK = 2048


class _Blocks(NamedTuple):
    """The segments cut into blocks: where each begins and ends, and its segment. Shape ``[blocks]``, int64."""

    starts: Tensor
    stops: Tensor
    segments: Tensor


def select(
    gradient: Tensor,
    residual: Tensor,
    segments: Sequence[tuple[int, int]],
    thresholds: Sequence[float],
    gradient_scale: float = 1.0,
) -> Selection:
    """Add the gradient to the residual and pick the entries at or above the threshold.

    See :mod:`lightning_dct.kernels.selection` for the contract.
    """
    if len(thresholds) != len(segments):
        raise ValueError(f"{len(thresholds)} thresholds for {len(segments)} segments")
    blocks = cut_into_blocks(tuple(segments), residual.device)
    grid = (blocks.starts.numel(),)
    if grid == (0,):
        return nothing(residual, [0] * len(segments))
    # Scale and thresholds in one copy to the device.
    numbers = torch.tensor([gradient_scale, *thresholds], dtype=residual.dtype, device=residual.device)
    counts = torch.empty_like(blocks.starts)
    broken = torch.empty_like(counts, dtype=torch.int32)
    # Without fusion of product and sum, which would round once where the other kernels round twice.
    settings = {"BLOCK": BLOCK, "enable_fp_fusion": False}
    accumulate_blocks[grid](gradient, residual, *blocks, numbers, counts, broken, **settings)
    ends = counts.cumsum(0)
    by_segment = counts.new_zeros(len(segments)).index_add_(0, blocks.segments, counts).tolist()
    positions = counts.new_empty(sum(by_segment))
    values = residual.new_empty(positions.numel())
    _compact[grid](gradient, residual, *blocks, numbers, counts, ends, broken, positions, values, **settings)
    return Selection(positions, values, by_segment)


# Annotations have to be names that the compiler knows, which typing.Any is not; the interpreter does not mind.
@triton.jit  # type: ignore[untyped-decorator]
def accumulate_blocks(
    gradient: tl.tensor,
    residual: tl.tensor,
    starts: tl.tensor,
    stops: tl.tensor,
    segments: tl.tensor,
    numbers: tl.tensor,
    counts: tl.tensor,
    broken: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Leave the sums in the residual, but for blocks with infinite or NaN sums: these are counted and left alone."""
    block = tl.program_id(0)
    places = tl.load(starts + block) + tl.arange(0, BLOCK)
    inside = places < tl.load(stops + block)
    old = tl.load(residual + places, mask=inside, other=0.0)
    addend = tl.load(gradient + places, mask=inside, other=0.0).to(old.dtype)
    fresh = old + addend * tl.load(numbers)
    magnitudes = tl.abs(fresh)
    # "Not below" instead of "at or above": it is true for NaN.
    below = magnitudes < tl.load(numbers + 1 + tl.load(segments + block))
    picked = tl.where(below, 0, 1) * inside.to(tl.int32)
    nonfinite = tl.where(magnitudes < float("inf"), 0, 1)
    num_nonfinite = tl.sum(nonfinite)
    tl.store(residual + places, fresh, mask=inside.to(tl.int32) * tl.where(num_nonfinite > 0, 0, 1) != 0)
    tl.store(counts + block, tl.sum(picked).to(tl.int64))
    tl.store(broken + block, num_nonfinite)


@triton.jit  # type: ignore[untyped-decorator]
def _compact(
    gradient: tl.tensor,
    residual: tl.tensor,
    starts: tl.tensor,
    stops: tl.tensor,
    segments: tl.tensor,
    numbers: tl.tensor,
    counts: tl.tensor,
    ends: tl.tensor,
    broken: tl.tensor,
    positions: tl.tensor,
    values: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write each block's picks to their place, and the sums of the blocks that were left alone."""
    block = tl.program_id(0)
    count = tl.load(counts + block)
    if count > 0:
        places = tl.load(starts + block) + tl.arange(0, BLOCK)
        inside = places < tl.load(stops + block)
        # Of the entries of this block: those whose sum is still to be made.
        unmade = inside.to(tl.int32) * tl.load(broken + block) != 0
        held = tl.load(residual + places, mask=inside, other=0.0)
        addend = tl.load(gradient + places, mask=unmade, other=0.0).to(held.dtype)
        fresh = tl.where(unmade, held + addend * tl.load(numbers), held)
        magnitudes = tl.abs(fresh)
        below = magnitudes < tl.load(numbers + 1 + tl.load(segments + block))
        picked = tl.where(below, 0, 1) * inside.to(tl.int32)
        slots = tl.load(ends + block) - count + tl.cumsum(picked) - 1
        tl.store(positions + slots, places, mask=picked != 0)
        tl.store(values + slots, fresh, mask=picked != 0)
        left = tl.where(magnitudes < float("inf"), fresh, held)
        tl.store(residual + places, left, mask=unmade)


@lru_cache(maxsize=256)
def cut_into_blocks(segments: tuple[tuple[int, int], ...], device: torch.device) -> _Blocks:
    """Blocks of at most ``BLOCK`` entries. Remembered, because a bucket's segments are the same in every step."""
    starts = [torch.arange(start, stop, BLOCK) for start, stop in segments]
    ends = [(part + BLOCK).clamp(max=stop) for part, (_, stop) in zip(starts, segments, strict=True)]
    owners = [torch.full_like(part, index) for index, part in enumerate(starts)]
    empty = [torch.empty(0, dtype=torch.int64)]
    return _Blocks(*(torch.cat(empty + parts).to(device) for parts in (starts, ends, owners)))
