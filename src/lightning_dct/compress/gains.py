"""The factors on the mean of each entry, as kernels read them: of a bucket's compressed tensors, or
of a dense one.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_dct.compress.awaited import to_device
from lightning_dct.compress.bucket_plan import BucketPlan, Gain
from lightning_dct.kernels.plain import Gains


def gains_of(
    plan: BucketPlan, gains: Mapping[str, Gain] | None, device: torch.device
) -> Gains | None:
    """The gains of a plan's compressed tensors, with factors on a device; None if all are 1, or
    depend on the number of senders.

    The plan keeps the latest, because they change rarely.
    """
    if not gains:
        return None
    if device not in plan.known_gains or plan.known_gains[device][0] is not gains:
        plan.known_gains[device] = gains, _joined(plan, gains, device)
    return plan.known_gains[device][1]


def _joined(plan: BucketPlan, gains: Mapping[str, Gain], device: torch.device) -> Gains | None:
    factors = [torch.ones(1, dtype=torch.float64)]
    places = []
    end = 1
    origins = [plan.origins[index] for index in plan.compressed]
    if all(name not in gains for name, _ in origins):
        return None
    begins: dict[str, tuple[int, int, int]] = {}
    for index, (name, first) in zip(plan.compressed, origins, strict=True):
        if name not in gains:
            # One row and one column, wider than the tensor, would need a factor for each entry: all
            # factors are 1.
            size = plan.sizes[index]
            factors.append(torch.ones(size, dtype=torch.float64))
            places.append((end, 0, 1, 0))
            end += size
            continue
        if name not in begins:
            gain = gains[name]
            begins[name] = end, end + len(gain.rows), len(gain.columns)
            factors += [gain.rows, gain.columns]
            end += len(gain.rows) + len(gain.columns)
        places.append((*begins[name], first))
    joined = torch.cat(factors).to(plan.residual_dtype)
    return Gains(to_device(joined, device), torch.tensor(places, dtype=torch.int64).T.contiguous())


def gain_of(plan: BucketPlan, index: int, gains: Mapping[str, Gain], mean: Tensor) -> Tensor:
    """The factors on the mean of one tensor of a plan: like that mean, shape ``[n]``."""
    name, first = plan.origins[index]
    if name not in gains:
        return torch.ones_like(mean)
    rows, columns = (factors.to(mean.dtype) for factors in gains[name])
    entries = (rows.unsqueeze(1) * columns).flatten()[first : first + mean.numel()]
    return to_device(entries, mean.device)
