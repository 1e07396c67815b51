"""Running means of the gradients' magnitudes, a number a column: which activations a loss is sensitive to.

To first order an activation ``h`` that is set to zero changes the loss by ``|h * dL/dh|`` (Molchanov et al., *Pruning
Convolutional Neural Networks for Resource Efficient Inference*, ICLR 2017, section 2.2). When activations are selected
their gradient is not known yet; what is known, on the rank that sends them, is the gradient that came back in earlier
steps. So with the column ``c`` of an entry, its place in the last dimension,

    score = |h| * m[c]
    r[c]  = mean |dL/dh| of the entries of c that came back in a step, over the mean of all that did;
            1 for a column of which none came
    m[c] <- 0.99 * m[c] + 0.01 * r[c]        after each optimizer step;  m starts at 1

Only ratios count, so a loss scale, or a gradient that shrinks as training goes on, changes nothing. Gradients come back
for entries that were sent. So that a column does not stay below the threshold for what its gradient was long ago, one
of which none is sent drifts back to 1, the mean of all: it is tried again some hundred steps later. (A column whose
activations are small stays small; for that there is ``exploration``.) The mean over entries that were sent is not that
over all entries: it leans to those of large magnitude, which are those there is to choose from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dct.activations.layout import ActivationLayout

DECAY = 0.99


class GradientMeans(nn.Module):
    """The means ``m``, and what has come back in this step; all in buffers, so that checkpoints hold them.

    They stay as they are during a step, whatever order micro-batches run in, until :meth:`fold`.
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
        """Scores: magnitudes times their columns' means.

        Args:
            layout: The layout of the activations.
            magnitudes: Shape ``layout.shape``, fp32.

        Raises:
            ValueError: The columns are others than before.
        """
        self._fit(layout)
        by_column = magnitudes.reshape(layout.by_column)
        return (by_column * self.means.unsqueeze(1)).view(layout.shape)

    def observe(self, layout: ActivationLayout, gradient: Tensor, positions: Tensor | None) -> None:
        """Take note of a gradient that came back.

        Args:
            layout: The layout of the activations.
            gradient: Shape ``layout.shape``.
            positions: Where it is not merely zero for not having been sent: int64 ``[count]``, which may end in places
                beyond the tensor. None for everywhere.
        """
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
        """Let what has come back since the last time change the means."""
        if self.means.numel() == 0:
            return
        overall = self.sums.sum() / self.counts.sum()
        relative = self.sums / self.counts / overall
        relative = torch.where((self.counts > 0) & (overall > 0), relative, 1.0).to(torch.float32)
        # A step without any gradient changes nothing. No waiting for a GPU to say whether this is one.
        weight = (1 - DECAY) * (self.counts.sum() > 0).to(torch.float32)
        self.means.lerp_(relative, weight)
        self.sums.zero_()
        self.counts.zero_()

    def _fit(self, layout: ActivationLayout) -> None:
        shape = (layout.column_groups, layout.row_length)
        if self.means.numel() == 0:
            # In place: DistributedDataParallel holds on to the buffers it was given.
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
            # `model.half()` and the like: a mean in few bits would not move by a hundredth.
            if buffer is not None and getattr(self, name).dtype != buffer.dtype:
                setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if prefix + "means" not in state_dict:  # saved without: they start at 1
            return
        for name in ("means", "sums", "counts"):
            getattr(self, name).resize_(state_dict[prefix + name].shape)
        super()._load_from_state_dict(state_dict, prefix, *args)
