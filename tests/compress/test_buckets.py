"""Tensors may lie anywhere in the bucket."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from lightning_dct.compress.bucket_plan import Bucket, BucketPlan, Received
from lightning_dct.compress.codec import compress, decompress
from lightning_dct.compress.error_feedback import ErrorFeedback
from strategies_for_hypothesis import FORMATS

SIZES = (300, 50, 200, 1)
TARGETS = (6, 0, 10, 0)
STARTS = (7, 307, 500, 701)  # nothing, a neighbour, a gap, a gap, and 3 entries behind
LENGTH = 705


def spread(entries: Tensor, rest: float) -> Tensor:
    """The entries where ``STARTS`` says, and ``rest`` everywhere else."""
    everywhere = torch.full((LENGTH,), rest, dtype=entries.dtype)
    for start, part in zip(STARTS, entries.split(SIZES), strict=True):
        everywhere[start : start + part.numel()] = part
    return everywhere


feedback = partial(ErrorFeedback, {}, adapt_threshold=False, undoable=False)


@pytest.mark.parametrize(
    ("dtype", "deferred"), [(torch.float32, {0}), (torch.bfloat16, set()), (torch.float64, {1, 2})]
)
@pytest.mark.parametrize("value_format", FORMATS)
def test_gaps_between_the_tensors_change_nothing(
    value_format: str, dtype: torch.dtype, deferred: set[int]
) -> None:
    together = BucketPlan(("a", "b", "c", "d"), SIZES, TARGETS, dtype, value_format)
    apart = replace(together, starts=STARTS)
    noise = torch.Generator().manual_seed(1)
    gradient = torch.randn(sum(SIZES), generator=noise).to(dtype)
    residuals = torch.randn(sum(SIZES), generator=noise).to(together.residual_dtype)
    spread_residuals = spread(residuals, 9.0)
    own, spread_own = (feedback(adapt_threshold=True) for _ in range(2))
    one, *rest = compress(own, Bucket([gradient.clone()], [residuals], 0.5), together, deferred)
    bucket = Bucket([spread(gradient, 8.0)], [spread_residuals], 0.5)
    other, *other_rest = compress(spread_own, bucket, apart, deferred)
    assert torch.equal(one, other)
    assert own.thresholds.state_dict() == spread_own.thresholds.state_dict()
    assert rest == other_rest
    assert torch.equal(spread_residuals, spread(residuals, 9.0))
    payloads = torch.stack([one, one])
    received = Received(payloads, together, 0.25, own=0)
    expected = decompress(own, received, torch.zeros(sum(SIZES), dtype=dtype))
    found = decompress(own, received._replace(plan=apart), spread(expected * 0, 8.0))
    assert torch.equal(found, spread(expected, 8.0))


def test_sums_of_half_precision_gradients_are_taken_in_fp32() -> None:
    """Whole tensors travel in the plan's dtype whatever the buffer's."""
    plan = BucketPlan(("a", "b"), (100, 3), (2, 0), torch.bfloat16, "fp32")
    gradient = torch.full((103,), 1.0, dtype=torch.bfloat16)
    sums = torch.zeros(103)
    gradient[100:] = 2.0**-7
    sent = [
        compress(feedback(), Bucket([part], [torch.zeros(103)], 1.0), plan, set())[0]
        for part in (gradient, torch.ones(103, dtype=torch.bfloat16))
    ]
    decompress(feedback(), Received(torch.stack(sent), plan, 1.0, own=0), sums)
    assert sums[100:].tolist() == [1 + 2.0**-7] * 3
    again, _ = compress(feedback(), Bucket([sums], [torch.zeros(103)], 1.0), plan, set())
    assert again.numel() == plan.layout.num_bytes == sent[0].numel()


def test_a_plan_without_tensors_writes_nothing() -> None:
    plan = BucketPlan((), (), (), torch.float32, "2bit", starts=())
    buffer = torch.ones(5)
    sent, _ = compress(feedback(), Bucket([buffer], [torch.ones(5)], 1.0), plan, set())
    assert (
        decompress(feedback(), Received(sent[None], plan, 1.0, own=0), buffer).tolist() == [1.0] * 5
    )
