"""Other ways to compress what crosses a border, to compare a subspace with: each stands where it stands.

The four families of Bian et al., *Does Compressing Activations Help Model Parallel Training?*, MLSys 2024:

==================  ================================================================================================
family              here
==================  ================================================================================================
top-k               ``SplitPoint(density=..., refresh_every=1, guard=False)``: the largest of every step, exactly
random-k            :class:`RandomSplit`
quantisation        ``SplitPoint(density=1.0, forward_format="int4", backward_format="int4")``, one scale a row
learned code        :func:`autoencoder`: two linear layers, trained with the model
==================  ================================================================================================
"""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dct import SplitPoint, subspace
from lightning_dct.activations import ActivationLayout, CodePoint
from lightning_dct.activations.codec import decode_values_at, read_header
from lightning_dct.activations.masking import explore
from lightning_dct.activations.noise import EXPLORATION, mixed_seed, uniform
from lightning_dct.wire import PayloadError


class DrawnLayout(ActivationLayout):
    """A layout whose positions both ends draw: none travel."""

    @cached_property
    def position_code(self) -> None:
        """No positions are written."""
        return None


class RandomSplit(SplitPoint):
    """All entries but some drawn by lot are set to zero; gradients come back for those only.

    The mask has ``k = ceil(density * n)`` entries, one drawn from each of ``k`` stretches of (nearly) equal length, so
    each entry with the same probability. They depend on ``seed`` and the step alone, so the micro-batches of a step
    share them. What is sent is not scaled up. (Bian et al. do not scale either.)
    """

    def layout(self, shape: torch.Size | tuple[int, ...]) -> DrawnLayout:
        """The layout of payloads for activations of a shape."""
        layout = super().layout(shape)
        return DrawnLayout(*(getattr(layout, field.name) for field in fields(layout)))

    def select_positions(self, layout: ActivationLayout, activations: Tensor) -> Tensor | None:
        """This step's lots, ascending, int64 ``[k]``; None for all."""
        if layout.sends_everything:
            return None
        seed = mixed_seed(self.seed, self.completed_steps)
        # The receiver draws before it has the data: nothing of them may decide.
        nothing = torch.zeros(1, device=activations.device)
        return explore(uniform(layout.capacity, seed, EXPLORATION, nothing), layout.numel)

    def decode_forward(
        self, layout: ActivationLayout, positions_payload: Tensor, values_payload: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Read the entries, drawing the same lots."""
        count = read_header(layout, positions_payload)
        if count != layout.capacity:
            raise PayloadError(f"the activations' payload claims {count} entries where {layout.capacity} are drawn")
        positions = self.select_positions(layout, values_payload)
        return decode_values_at(layout, layout.forward_format, values_payload, positions, dtype), positions


def autoencoder(width: int, code: int, **settings: Any) -> tuple[nn.Linear, CodePoint, nn.Module]:
    """A learned code: a subspace without an anchor, whose two matrices are trained with the model.

    Args:
        width: Entries of a token, the last dimension.
        code: How many numbers of each cross.
        **settings: As :func:`lightning_dct.subspace` takes them.
    """
    encoder, point, decoder = subspace(width, code, **settings)
    return encoder.requires_grad_(), point, decoder.requires_grad_()
