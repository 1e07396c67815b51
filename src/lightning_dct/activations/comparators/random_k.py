"""Random-k: the entries that are sent are drawn by lot, new ones in every step, from a seed that both ends know."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from lightning_dct.activations.codec import (
    Encoded,
    decode_backward,
    decode_values_at,
    encode_backward,
    encode_forward,
    read_header,
)
from lightning_dct.activations.comparators.compared import Compared
from lightning_dct.activations.layout import ActivationLayout, activation_layout
from lightning_dct.activations.masking import explore
from lightning_dct.activations.noise import EXPLORATION, mixed_seed, uniform
from lightning_dct.activations.settings import SplitSettings
from lightning_dct.wire.payload import PayloadError


@dataclass(frozen=True)
class DrawnLayout(ActivationLayout):
    """A layout whose positions both ends draw: none travel."""

    @cached_property
    def position_code(self) -> None:
        """No positions are written."""
        return None


class RandomSplit(Compared[DrawnLayout]):
    """All entries but some drawn by lot are set to zero; gradients come back for those only.

    Forward gives ``h * M`` and backward ``M * gradient``, as :class:`~lightning_dct.SplitPoint` does, with a mask ``M``
    of ``k = ceil(density * n)`` entries in place of a threshold's: one drawn from each of ``k`` stretches of (nearly)
    equal length, so each entry with the same probability. They depend on ``seed`` and the step alone, so the
    micro-batches of a step share them. What is sent is not scaled up. (Bian et al., MLSys 2024, whose random-k it is,
    do not scale either.)
    """

    def layout(self, shape: torch.Size | tuple[int, ...]) -> DrawnLayout:
        """The layout of payloads for activations of a shape."""
        return _drawn_layout(self.settings_now, tuple(shape))

    def encode_forward(self, activations: Tensor) -> Encoded:
        """Write the entries that this step's lot has fallen on."""
        layout = self.layout(activations.shape)
        return encode_forward(layout, activations, self._draw(layout, activations.device), self.rounding_seed)

    def decode_forward(
        self, layout: DrawnLayout, positions_payload: Tensor, values_payload: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Read them, drawing the same lots."""
        count = read_header(layout, positions_payload)
        if count != layout.capacity:
            raise PayloadError(f"the activations' payload claims {count} entries where {layout.capacity} are drawn")
        positions = self._draw(layout, values_payload.device)
        return decode_values_at(layout, layout.forward_format, values_payload, positions, dtype), positions

    def encode_backward(self, layout: DrawnLayout, gradient: Tensor, kept: Tensor | None, seed: int | None) -> Tensor:
        """Write the gradient of the entries that were sent."""
        return encode_backward(layout, gradient, kept, seed)

    def decode_backward(self, layout: DrawnLayout, payload: Tensor, kept: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Read the gradient of the entries that were sent."""
        return decode_backward(layout, payload, kept, dtype)

    def _draw(self, layout: DrawnLayout, device: torch.device) -> Tensor | None:
        """The positions, ascending, int64 ``[k]``; None for all."""
        if layout.sends_everything:
            return None
        seed = mixed_seed(self.seed, self.completed_steps)
        # The receiver draws before it has the data: nothing of them may decide.
        return explore(uniform(layout.capacity, seed, EXPLORATION, torch.zeros(1, device=device)), layout.numel)


@lru_cache(maxsize=64)
def _drawn_layout(settings: SplitSettings, shape: tuple[int, ...]) -> DrawnLayout:
    layout = activation_layout(settings, shape, settings.density)
    return DrawnLayout(*(getattr(layout, field.name) for field in fields(layout)))
