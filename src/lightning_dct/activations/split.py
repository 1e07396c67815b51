"""`Split`: a module between two pieces of a model that compresses what crosses, in one process or between two.

Two payloads cross forward: *values*, whose gradients come back, and the *positions* of the entries that were sent,
which have no gradient. The sender keeps the positions, so they do not come back.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dct.activations import codec
from lightning_dct.activations.codec import Encoded
from lightning_dct.activations.layout import ActivationLayout
from lightning_dct.activations.module import CompressedModule
from lightning_dct.activations.noise import mixed_seed
from lightning_dct.traffic import FP32_BYTES


class Split(CompressedModule):
    """A border in an ``nn.Sequential``: :class:`~lightning_dct.SplitPoint`, or another method to compare it with.

    A pipeline strategy calls the four methods that encode and decode. In one process the module does the work of both
    ends without a wire. It gives the same values, and counts the same bytes, both ways, when the gradient comes back.
    """

    @property
    @abstractmethod
    def seed(self) -> int:
        """Start of all random choices, the same on both ends."""

    @abstractmethod
    def layout(self, shape: torch.Size | tuple[int, ...]) -> ActivationLayout:
        """The layout of payloads for activations of a shape, fixed during a stage of warm-up."""

    @abstractmethod
    def encode_forward(self, activations: Tensor) -> Encoded:
        """Write activations: what crosses, and what the sender keeps to read the gradient."""

    def decode_forward(
        self, layout: ActivationLayout, positions_payload: Tensor, values_payload: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Read activations, and what the receiver keeps to write the gradient.

        Raises:
            PayloadError: The bytes are not payloads of this layout.
        """
        return codec.decode_forward(layout, positions_payload, values_payload, dtype)

    def encode_backward(
        self, layout: ActivationLayout, gradient: Tensor, kept: Tensor | None, seed: int | None
    ) -> Tensor:
        """Write the gradient of the activations as received; ``seed`` is what :attr:`rounding_seed` was then."""
        return codec.encode_backward(layout, gradient, kept, seed)

    def decode_backward(
        self, layout: ActivationLayout, payload: Tensor, kept: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Read the gradient.

        Raises:
            PayloadError: The payload has another size.
        """
        return codec.decode_backward(layout, payload, kept, dtype)

    @property
    def rounding_seed(self) -> int | None:
        """Seeds this step's rounding, also in :meth:`encode_backward`; None in evaluation, which rounds to nearest."""
        return mixed_seed(self.seed, self.completed_steps) if self.training else None

    def forward(self, activations: Tensor) -> Tensor:
        """Compress floating-point activations of any shape, and their gradients on the way back."""
        return _Crossing.apply(activations, self, self.layout(activations.shape))

    def cross(self, layout: ActivationLayout, activations: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the receiver sees and keeps, in one process."""
        encoded = self.encode_forward(activations)
        return self.decode_forward(layout, encoded.positions_payload, encoded.values_payload, activations.dtype)

    def count(self, layout: ActivationLayout, bytes_sent: int, kept: Tensor | None) -> None:
        """Count one direction's payload, in training only."""
        if self.training:
            self.traffic.add(
                bytes_sent=bytes_sent,
                bytes_dense=FP32_BYTES * self.entries_due(layout),
                entries_sent=self.entries_sent(layout, kept),
                entries=self.entries_due(layout),
            )

    def entries_due(self, layout: ActivationLayout) -> int:
        """Numbers that would cross one way without compression."""
        return layout.numel

    def entries_sent(self, layout: ActivationLayout, kept: Tensor | None) -> int:
        """Numbers among a payload's values."""
        return layout.numel if kept is None else kept.numel()

    def timed(self) -> AbstractContextManager[None]:
        """Count the time spent encoding or decoding, in training only."""
        return self.traffic.timed() if self.training else nullcontext()


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activations: Tensor, split: Split, layout: ActivationLayout) -> Tensor:
        with split.timed():
            received, kept = split.cross(layout, activations)
        # Not by `save_for_backward`: under activation checkpointing, backward would get what the second forward kept.
        ctx.crossing = split, layout, kept, split.rounding_seed
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        split, layout, kept, seed = ctx.crossing
        with split.timed():
            payload = split.encode_backward(layout, grad_outputs[0], kept, seed)
            gradient = split.decode_backward(layout, payload, kept, grad_outputs[0].dtype)
        # Counted here, because a forward may run twice.
        forward = max(4 * layout.wire_floats, layout.forward_values_bytes) + layout.forward_positions_bytes
        split.count(layout, forward, kept)
        split.count(layout, 4 * layout.wire_floats, kept)
        return gradient, None, None
