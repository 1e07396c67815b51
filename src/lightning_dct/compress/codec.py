"""One bucket: select entries, pack them into a payload, and add received payloads.

No communication.

    gradients   a = e + g        e = a - read(payload)                 e: the residual
    updates     a = w - S        nothing to write                      w: own weights, S: the shared ones

    rank r      flag |a| >= tau      pack ---+
                                             |  payloads as bytes, by any exchange
                                             v
    gradients   g = (1 / W) * sum over ranks of read(payload)
    updates     S += m,  w += m - read(own payload)                    m = (f / W) * the same sum

This is the data-parallel half of Dynamic Communication Thresholding (Gupta et al., KDD 2021,
section 3.1), with a threshold for each tensor. Two functions do the work, ``compress_bucket`` and
``add_payloads``: those of :mod:`~lightning_dct.compress.on_cpu` in plain torch or numba, and those
of :mod:`~lightning_dct.compress.on_gpu` in Triton. All give the same bits.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lightning_dct.compress import on_cpu
from lightning_dct.compress.awaited import must_not_wait
from lightning_dct.compress.bucket_plan import (
    NO_CONTEXT,
    Bucket,
    BucketPlan,
    ExchangeContext,
    Received,
)
from lightning_dct.compress.error_feedback import ErrorFeedback
from lightning_dct.compress.threshold import sample_of, threshold_from
from lightning_dct.wire.positions import PayloadError


def compress(
    feedback: ErrorFeedback,
    bucket: Bucket,
    plan: BucketPlan,
    deferred: set[int],
    context: ExchangeContext = NO_CONTEXT,
) -> tuple[Tensor, int | Tensor]:
    """Pack the entries that reach their threshold, except of tensors with ``deferred`` indices.

    The rest of gradients stays in the residual: ``decoded(payload) + residual`` equals the earlier
    ``residual + scale * gradient``. Infinite and NaN entries go into the payload, and the residual
    keeps its old value. Weights do not change. Thresholds that are missing are selected from this
    bucket.

    Returns:
        The payload: shape ``[plan.num_bytes]``, uint8; for a plan with parts, their payloads one
        after the other. And the number of its compressed entries; for a GPU a tensor on it, int64,
        with those of each part.
    """
    used = (
        tuple([index for index in plan.compressed if index not in deferred])
        if deferred
        else plan.compressed
    )
    names, targets = plan.of_tensors(used)
    missing = feedback.thresholds.missing(names, targets)
    for number in missing:
        size = plan.sizes[used[number]]
        target = targets[number]
        bounds = plan.bounds[used[number]]
        sampled = bucket.entries(bounds, sample_of(size, target))
        feedback.thresholds.set(names[number], target, threshold_from(sampled, size, target))
    feedback.selected |= bool(missing)
    return _code_for(bucket.references[0].device).compress_bucket(
        feedback, bucket, plan, used, deferred, context
    )


def _code_for(device: torch.device) -> Any:
    # Triton is there only with torch for CUDA.
    return import_module("lightning_dct.compress.on_gpu") if must_not_wait(device) else on_cpu


def decompress(feedback: ErrorFeedback, received: Received, buffer: Tensor) -> Tensor:
    """Overwrite a bucket with the weighted sum of all ranks' payloads.

    Every rank adds the same payloads in the same order, so replicas stay bitwise identical. Each
    entry's weight follows from its gain, or from the number of ranks that have sent it; see
    :func:`~lightning_dct.kernels.weights_by_senders`. ``buffer``, shape ``[n]``, is overwritten
    where the plan's tensors lie.

    Raises:
        PayloadError: A payload is corrupt or has another plan; the message names the rank. On a GPU
            ``feedback.awaited`` raises it later.
    """
    plan = received.plan
    total = buffer if buffer.dtype == plan.residual_dtype else buffer.to(plan.residual_dtype)
    if plan.starts is None:
        total[: sum(plan.sizes)].zero_()
    elif plan.bounds:
        torch._foreach_zero_([total[start:stop] for start, stop in plan.bounds])
    apply(feedback, received, Bucket([], [total], None))
    return total if total is buffer else buffer.copy_(total)


def decompress_own(feedback: ErrorFeedback, received: Received, mean: Tensor) -> Tensor:
    """What this rank has sent of a bucket, as far as it counts: shape ``[n]``, like the
    ``mean``.
    """
    own = received.own
    assert own is not None
    alone = (
        own
        if isinstance(own, Received)
        else received._replace(payloads=received.payloads[own].unsqueeze(0))
    )
    alone = alone._replace(
        factor=1.0,
        own=None,
        label=received.label or "This rank's own updates",
        context=received.context.without_gains(),
    )
    sent = decompress(feedback, alone, torch.empty_like(mean))
    return torch.where(counting(mean, alone.plan), sent, 0.0) if isinstance(own, Received) else sent


def counting(sums: Tensor, plan: BucketPlan) -> Tensor:
    """Which entries of a sum have been sent: all of a dense tensor, else those that are not zero.

    Bool, ``[n]``.
    """
    sent = sums != 0
    for index in plan.dense:
        sent[slice(*plan.bounds[index])] = True
    return sent


def apply(feedback: ErrorFeedback, received: Received, bucket: Bucket) -> None:
    """Add the weighted sum of all ranks' payloads to the references of a bucket.

    Own weights, if the bucket has any, change by as much, less what this rank has sent, if it has.
    :func:`decompress` describes the arguments and errors.
    """
    payloads = received.payloads
    plan = received.plan
    label = received.label or feedback.label
    if payloads.shape[1] != plan.num_bytes:
        raise PayloadError(
            f"{label} from rank 0 of the process group: a payload has {payloads.shape[1]} bytes"
            f" where its layout has {plan.num_bytes}: use the same model, settings and version of"
            " lightning_dct on every rank."
        )
    _code_for(payloads.device).add_payloads(feedback, received, bucket, label)
