"""The compression ratio as a torchmetrics metric: bytes of the dense fp32 exchange over bytes sent, over all ranks."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_dct.traffic import TrafficTotals


class CompressionRatio(Metric):
    """Dense fp32 bytes over bytes really sent, summed over updates and ranks.

    ``compute`` returns a scalar fp64 tensor; NaN when nothing was sent.

    Example:
        >>> from lightning_dct import CompressionRatio
        >>> from lightning_dct.traffic import TrafficTotals
        >>> ratio = CompressionRatio()
        >>> ratio.update(TrafficTotals(bytes_sent=10, bytes_dense=1000))
        >>> ratio.update(TrafficTotals(bytes_sent=30, bytes_dense=1000))
        >>> ratio.compute()
        tensor(50., dtype=torch.float64)
    """

    higher_is_better = True
    is_differentiable = False
    full_state_update = False
    bytes_sent: Tensor
    bytes_dense: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        zero = torch.zeros((), dtype=torch.float64)
        self.add_state("bytes_sent", zero.clone(), dist_reduce_fx="sum")
        self.add_state("bytes_dense", zero.clone(), dist_reduce_fx="sum")

    def update(self, traffic: TrafficTotals) -> None:
        """Add what was sent since the last update: ``strategy.traffic.totals - totals_at_last_update``."""
        self.bytes_sent += traffic.bytes_sent
        self.bytes_dense += traffic.bytes_dense

    def compute(self) -> Tensor:
        """The ratio over everything added so far."""
        return torch.where(self.bytes_sent > 0, self.bytes_dense / self.bytes_sent, torch.nan)
