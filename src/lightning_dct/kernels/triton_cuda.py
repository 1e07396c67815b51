"""Selects into a buffer of fixed capacity on a CUDA GPU, compiled by triton, which comes with CUDA builds of torch.

The first launch reads gradient and residual, writes their sum and counts each block's selected entries. It moves as
many bytes as ``torch.add(gradient, residual, out=residual)``. Cumulative sums of the counts give the first slot of each
block, so entries stay in order without a sort. The second launch reads the residual of blocks with selected entries
again, and writes these to their slots.

It compiles for GPUs and runs in triton's interpreter. It has not run on a GPU yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dct.kernels.buffered import BLOCK, BufferedSelection, Segments, no_segments


def select_into_buffer(gradient: Tensor, residual: Tensor, segments: Segments, numbers: Tensor) -> BufferedSelection:
    """See :func:`lightning_dct.kernels.buffered.select_into_buffer`."""
    if not segments.bounds:
        return no_segments(residual)
    blocks, sizes, begins = segments.blocks, segments.slots, segments.begins
    reached = torch.empty_like(blocks.starts)
    nonfinite = torch.empty_like(reached, dtype=torch.int32)
    # Without fusion of product and sum, which would round once instead of twice.
    settings = {"BLOCK": BLOCK, "enable_fp_fusion": False}
    grid = (blocks.starts.numel(),)
    _accumulate[grid](gradient, residual, *blocks, numbers, reached, nonfinite, **settings)
    no_counts = reached.new_zeros(len(segments.bounds))
    broken = no_counts.index_add(0, blocks.segments, nonfinite.long()) > 0
    picks = torch.where(broken[blocks.segments], nonfinite.long(), reached)
    counts = no_counts.index_add(0, blocks.segments, picks)
    # The number of selected entries of the same segment in the blocks before.
    before = picks.cumsum(0) - picks - (counts.cumsum(0) - counts)[blocks.segments]
    positions = reached.new_zeros(sum(segments.capacities))
    values = residual.new_zeros(positions.numel())
    segments_numbers = (numbers, counts, broken, sizes, begins)
    _fill[grid](gradient, residual, *blocks, *segments_numbers, picks, before, nonfinite, positions, values, **settings)
    return BufferedSelection(positions, values, counts, broken)


# The compiler does not know typing.Any, so annotations are its own types.
@triton.jit  # type: ignore[untyped-decorator]
def _accumulate(
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
    """Write the sums to the residual, except in blocks with infinite or NaN sums; count these and selected entries."""
    block = tl.program_id(0)
    indices = tl.load(starts + block) + tl.arange(0, BLOCK)
    inside = indices < tl.load(stops + block)
    old = tl.load(residual + indices, mask=inside, other=0.0)
    addend = tl.load(gradient + indices, mask=inside, other=0.0).to(old.dtype)
    fresh = old + addend * tl.load(numbers)
    magnitudes = tl.abs(fresh)
    # "Not below" instead of "at or above", because it is true for NaN.
    below = magnitudes < tl.load(numbers + 1 + tl.load(segments + block))
    picked = tl.where(below, 0, 1) * inside.to(tl.int32)
    nonfinite = tl.where(magnitudes < float("inf"), 0, 1)
    num_nonfinite = tl.sum(nonfinite)
    tl.store(residual + indices, fresh, mask=inside.to(tl.int32) * tl.where(num_nonfinite > 0, 0, 1) != 0)
    tl.store(counts + block, tl.sum(picked).to(tl.int64))
    tl.store(broken + block, num_nonfinite)


@triton.jit  # type: ignore[untyped-decorator]
def _fill(
    gradient: tl.tensor,
    residual: tl.tensor,
    starts: tl.tensor,
    stops: tl.tensor,
    segments: tl.tensor,
    numbers: tl.tensor,
    counts: tl.tensor,
    broken: tl.tensor,
    sizes: tl.tensor,
    begins: tl.tensor,
    picks: tl.tensor,
    before: tl.tensor,
    unmade: tl.tensor,
    positions: tl.tensor,
    values: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write a block's selected entries to their slots, and the sums of blocks with infinite or NaN sums."""
    block = tl.program_id(0)
    if tl.load(picks + block) > 0:
        segment = tl.load(segments + block)
        indices = tl.load(starts + block) + tl.arange(0, BLOCK)
        inside = indices < tl.load(stops + block)
        to_make = inside.to(tl.int32) * tl.load(unmade + block) != 0
        stored = tl.load(residual + indices, mask=inside, other=0.0)
        addend = tl.load(gradient + indices, mask=to_make, other=0.0).to(stored.dtype)
        fresh = tl.where(to_make, stored + addend * tl.load(numbers), stored)
        magnitudes = tl.abs(fresh)
        is_broken = tl.load(broken + segment).to(tl.int32)
        reached = tl.where(magnitudes < tl.load(numbers + 1 + segment), 0, 1)
        nonfinite = tl.where(magnitudes < float("inf"), 0, 1)
        picked = (is_broken * nonfinite + (1 - is_broken) * reached) * inside.to(tl.int32)
        count = tl.load(counts + segment)
        size = tl.load(sizes + segment)
        ranks = tl.load(before + block) + tl.cumsum(picked).to(tl.int64)
        # Every (count / size)-th of more entries than slots, unless the segment is broken.
        overflows = (1 - is_broken) * tl.where(count > size, 1, 0)
        sampled = ranks * size // count
        is_sample = tl.where(sampled > (ranks - 1) * size // count, 1, 0)
        kept = overflows * is_sample + (1 - overflows) * tl.where(ranks <= size, 1, 0)
        slots = tl.load(begins + segment) + tl.where(overflows > 0, sampled, ranks) - 1
        tl.store(positions + slots, indices, mask=kept * picked != 0)
        tl.store(values + slots, fresh, mask=kept * picked != 0)
        left = tl.where(magnitudes < float("inf"), fresh, stored)
        tl.store(residual + indices, left, mask=to_make)
