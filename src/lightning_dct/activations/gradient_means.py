"""Running means of the gradients' magnitudes, one per column: which activations the loss is sensitive to.

To first order, setting an activation ``h`` to zero changes the loss by ``|h * dL/dh|`` (Molchanov et al., *Pruning
Convolutional Neural Networks for Resource Efficient Inference*, ICLR 2017, section 2.2). The sender selects activations
before it has their gradient, but it has the gradients of earlier steps. With the column ``c`` of an entry, its index in
the last dimension,

    score = |h| * m[c]
    r[c]  = mean |dL/dh| of the entries of c that came back in a step, over the mean of all that did;
            1 for a column of which none came
    m[c] <- 0.99 * m[c] + 0.01 * r[c]        after each optimizer step;  m starts at 1

Only ratios count, so a loss scale or shrinking gradients change nothing. Gradients come back only for entries that were
sent. A column without any drifts back to 1, the mean of all, so that an old gradient does not keep it below the
threshold for more than some hundred steps. (A column with small activations stays small; ``exploration`` helps there.)
The mean is over entries that were sent, which are the larger ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dct.activations.layout import ActivationLayout

DECAY = 0.99


class GradientMeans(nn.Module):
    """The means ``m``, and the sums and counts of this step, in buffers for checkpoints.

    The means are constant during a step, whatever the order of micro-batches, until :meth:`fold`.
    """

    means: Tensor
    sums: Tensor
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Sized by the first activations: shape [column groups, row length].
        self.register_buffer("means", torch.ones(0, 0))
        # In fp64, so that the order of micro-batches does not matter.
        self.register_buffer("sums", torch.zeros(0, 0, dtype=torch.float64))
        self.register_buffer("counts", torch.zeros(0, 0, dtype=torch.int64))

    def weigh(self, layout: ActivationLayout, magnitudes: Tensor) -> Tensor:
        """Scores: magnitudes (fp32, ``layout.shape``) times their columns' means.

        Raises:
            ValueError: The columns are others than before.
        """
        self._fit(layout)
        by_column = magnitudes.reshape(layout.by_column)
        return (by_column * self.means.unsqueeze(1)).view(layout.shape)

    def observe(self, layout: ActivationLayout, gradient: Tensor, positions: Tensor | None) -> None:
        """Note a gradient that came back at ``positions``, which may end beyond the tensor; None for everywhere."""
        if layout.numel == 0:
            return
        self._fit(layout)
        magnitudes = gradient.detach().reshape(-1).abs().to(torch.float64)
        if positions is None:
            positions = torch.arange(layout.numel, device=gradient.device)
        inside = positions.clamp(max=layout.numel - 1)
        came = magnitudes[inside]
        usable = (positions < layout.numel) & came.isfinite()
        columns = layout.columns_of(inside)
        self.sums.view(-1).index_add_(0, columns, torch.where(usable, came, 0.0))
        self.counts.view(-1).index_add_(0, columns, usable.to(torch.int64))

    def fold(self) -> None:
        """Move the means by what has come back since the last call."""
        if self.means.numel() == 0:
            return
        overall = self.sums.sum() / self.counts.sum()
        relative = self.sums / self.counts / overall
        relative = torch.where((self.counts > 0) & (overall > 0), relative, 1.0).to(torch.float32)
        # A step without any gradient changes nothing. A branch would wait for a GPU.
        weight = (1 - DECAY) * (self.counts.sum() > 0).to(torch.float32)
        self.means.lerp_(relative, weight)
        self.sums.zero_()
        self.counts.zero_()

    def _fit(self, layout: ActivationLayout) -> None:
        shape = (layout.column_groups, layout.row_length)
        if self.means.numel() == 0:
            # In place: DistributedDataParallel keeps references to the buffers.
            self.means.resize_(shape).fill_(1.0)
            self.sums.resize_(shape).zero_()
            self.counts.resize_(shape).zero_()
        elif tuple(self.means.shape) != shape:
            raise ValueError(
                f"The activations (shape {list(layout.shape)}) have {shape[0]} x {shape[1]} columns, and"
                f" select_by='magnitude_times_gradient' remembers the gradients of {list(self.means.shape)}. Use a"
                " split point for each kind of activations, or select_by='magnitude'."
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GradientMeans:
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            # After `model.half()` and the like: a move by a hundredth needs the bits of an fp32.
            if buffer is not None and getattr(self, name).dtype != buffer.dtype:
                setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if prefix + "means" not in state_dict:  # saved without: they start at 1
            return
        for name in ("means", "sums", "counts"):
            getattr(self, name).resize_(state_dict[prefix + name].shape)
        super()._load_from_state_dict(state_dict, prefix, *args)
