"""Gradients of a rank's rows: collected from all ranks as they come in, handed to the optimizer when backward ends."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dct.kernels import add_rows


class CollectedGradients:
    """What has arrived for this rank's rows and waits for a backward to end.

    Attributes:
        parts: Places among this rank's rows (int64 ``[k]``) and gradients (``[k, dim]``), in order of arrival.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[Tensor, Tensor]] = []

    def add(self, places: Tensor, gradient: Tensor) -> None:
        """Add to the gradient of some rows.

        Args:
            places: Shape ``[k]``, int64; a row may come more than once.
            gradient: Shape ``[k, dim]``: of the mean loss of the rank it comes from.
        """
        self.parts.append((places, gradient))

    def deliver(self, weight: Tensor, world_size: int) -> None:
        """Add what was collected to ``weight.grad``, a sparse tensor, as the mean over ranks; nothing is left here.

        Args:
            weight: This rank's rows, ``[rows, dim]``.
            world_size: Over how many ranks the sum is taken.
        """
        distinct, inverse = torch.unique(torch.cat([places for places, _ in self.parts]), return_inverse=True)
        summed = self.parts[0][1].new_zeros(distinct.numel(), weight.shape[1])
        for part, (_, gradient) in zip(inverse.split([len(p) for p, _ in self.parts]), self.parts, strict=True):
            add_rows(summed, part, gradient)
        self.parts = []
        mean = summed.div_(world_size).to(weight.dtype)
        gradient = torch.sparse_coo_tensor(
            distinct.unsqueeze(0), mean, weight.shape, is_coalesced=True, check_invariants=False
        )
        weight.grad = gradient if weight.grad is None else (weight.grad + gradient).coalesce()
