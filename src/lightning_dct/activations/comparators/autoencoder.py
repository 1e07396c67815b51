"""A learned code: a linear layer makes tokens shorter, another one makes them whole again, both part of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_dct.activations.comparators.compared import FORMATS, chosen_settings
from lightning_dct.activations.layout import ActivationLayout, entries_at
from lightning_dct.activations.split_point import SplitPoint


class CodePoint(SplitPoint):
    """A split point that codes cross, all their entries, counted against the activations that they stand for.

    Args:
        width: Entries of a token before it was encoded.
        **settings: Those of :func:`autoencoder`.
    """

    def __init__(self, width: int, **settings: Any) -> None:
        super().__init__(density=1.0, **settings)
        self.width = width

    def entries_due(self, layout: ActivationLayout) -> int:
        """Entries of the activations, not of their code."""
        return layout.numel // max(layout.row_length, 1) * self.width


def autoencoder(width: int, density: float = 0.05, **settings: Any) -> tuple[nn.Linear, CodePoint, nn.Linear]:
    """Three modules to stand where one :class:`~lightning_dct.SplitPoint` stands in an ``nn.Sequential``.

    ::

        forward     c = E h, which crosses;     the next module sees D c
        backward    dL/dc crosses

    with ``E [code, width]``, ``D [width, code]`` and ``code = ceil(density * width)``. Both are trained by the model's
    optimizer, ``E`` on the rank that sends and ``D`` on the one that receives. They begin as a projection: the rows of
    ``E`` orthonormal, ``D`` its transpose. (Bian et al., MLSys
    2024, train such a pair.)

    Args:
        width: Entries of a token, the last dimension.
        density: Share of them that a code has, in (0, 1].
        **settings: Of the attributes of :class:`~lightning_dct.activations.SplitSettings`: ``forward_format``,
            ``backward_format``, ``compress_evaluation`` (whether evaluation rounds codes too) and ``seed``.

    Raises:
        TypeError: A setting is none of these, or has the wrong type.
        ValueError: A setting is out of range.

    Example:
        >>> network = nn.Sequential(nn.Linear(8, 16), *autoencoder(16, density=0.25), nn.Linear(16, 2))
        >>> network(torch.zeros(3, 8)).shape
        torch.Size([3, 2])
    """
    chosen = chosen_settings("an autoencoder", density, settings, FORMATS)
    code = entries_at(chosen.density, width)
    encoder, decoder = nn.Linear(width, code, bias=False), nn.Linear(code, width, bias=False)
    nn.init.orthogonal_(encoder.weight)
    with torch.no_grad():
        decoder.weight.copy_(encoder.weight.t())
    return encoder, CodePoint(width, **settings), decoder
