"""Low rank: activations and their gradients cross as seen from a subspace that follows them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_dct.activations.codec import (
    Encoded,
    decode_backward,
    decode_forward,
    decode_values_at,
    encode_backward,
    encode_forward,
    encode_values_at,
)
from lightning_dct.activations.comparators.compared import Compared
from lightning_dct.activations.layout import ActivationLayout, activation_layout, entries_at
from lightning_dct.activations.noise import EXPLORATION, FORWARD_ROUNDING, mixed_seed, uniform
from lightning_dct.activations.settings import SplitSettings

# Written so whatever the formats are: it has few rows, and what is rounded there is rounded in every token.
BASIS_FORMAT = "bf16"


@dataclass(frozen=True)
class LowRankLayout:
    """What is sent of a tensor ``[..., width]``, seen as tokens ``[tokens, width]``.

    Attributes:
        shape: Shape of the activations.
        codes: Of the tokens' coordinates in the subspace, ``[tokens, rank]``.
        basis: Of the subspace's basis, transposed: ``[rank, width]``. None where the coordinates are the tokens
            themselves, as the rank is their width.
    """

    shape: tuple[int, ...]
    codes: ActivationLayout
    basis: ActivationLayout | None

    @property
    def numel(self) -> int:
        """Entries of the tensor."""
        return self.codes.numel // max(self.rank, 1) * self.width

    @property
    def width(self) -> int:
        """Entries of a token."""
        return self.shape[-1] if self.shape else 1

    @property
    def rank(self) -> int:
        """Dimensions of the subspace."""
        return self.codes.row_length

    @property
    def forward_positions_bytes(self) -> int:
        """Size of the forward payload without gradient: a header and the basis."""
        basis = 0 if self.basis is None else self.basis.values_bytes(BASIS_FORMAT)
        return self.codes.forward_positions_bytes + basis

    @property
    def forward_values_bytes(self) -> int:
        """Size of the coordinates."""
        return self.codes.forward_values_bytes

    @property
    def backward_bytes(self) -> int:
        """Size of the gradient's coordinates."""
        return self.codes.backward_bytes

    @property
    def wire_floats(self) -> int:
        """Four-byte words that hold either direction's coordinates."""
        return self.codes.wire_floats


class LowRankSplit(Compared[LowRankLayout]):
    """Tokens cross as their coordinates in a subspace of ``rank = ceil(density * width)`` dimensions, with its basis.

    With tokens ``H [n, width]`` and the basis ``V [width, rank]`` of the step before::

        V <- orthonormal(H^T (H V))          one step of subspace iteration, on the rank that sends
        forward     send H V and V;          the receiver sees H V V^T
        backward    send G V;                the sender sees G V V^T, with G the gradient as received

    Backward is the exact gradient of ``H V V^T`` for a ``V`` that is held constant: one subspace for both directions,
    as a split point has one mask. The iteration that goes on from the last step's basis is that of PowerSGD (Vogels et
    al., NeurIPS 2019), which compresses gradients of weights; here the right factor is the orthonormal one, as there
    are more tokens than entries of a token. All micro-batches of a step begin with the same ``V``.
    """

    basis: Tensor
    _in_use: Tensor

    def __init__(self, density: float = 0.05, **settings: Any) -> None:
        super().__init__(density, **settings)
        # What the next step begins with, and what this one does; sized by the first activations.
        self.register_buffer("basis", torch.zeros(0, 0))
        self.register_buffer("_in_use", torch.zeros(0, 0), persistent=False)
        self._begun = False

    def layout(self, shape: torch.Size | tuple[int, ...]) -> LowRankLayout:
        """The layout of payloads for activations of a shape."""
        return _low_rank_layout(self.settings_now, tuple(shape))

    def advance(self, completed_steps: int) -> None:
        """Begin the step that follows ``completed_steps`` optimizer steps, with the last one's basis."""
        if completed_steps != self.completed_steps:
            self._begun = False
        super().advance(completed_steps)

    def encode_forward(self, activations: Tensor) -> Encoded:
        """Write coordinates and basis; the sender keeps the basis as it is read on the other side."""
        layout = self.layout(activations.shape)
        if layout.basis is None:
            return encode_forward(layout.codes, activations, None, self.rounding_seed)
        with _in_fp32(activations):
            tokens = _tokens(layout, activations)
            found = self._next_basis(tokens, layout.rank)
            payload = encode_values_at(layout.basis, BASIS_FORMAT, found.t(), None, None, FORWARD_ROUNDING)
            basis = _read_basis(layout.basis, payload)
            encoded = encode_forward(layout.codes, tokens @ basis, None, self.rounding_seed)
        return Encoded(torch.cat([encoded.positions_payload, payload]), encoded.values_payload, basis)

    def decode_forward(
        self, layout: LowRankLayout, positions_payload: Tensor, values_payload: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Read tokens from their coordinates, and the basis."""
        cut = layout.codes.forward_positions_bytes
        received = torch.float32 if layout.basis is not None else dtype
        codes, _ = decode_forward(layout.codes, positions_payload[:cut], values_payload, received)
        if layout.basis is None:
            return codes.view(layout.shape), None
        basis = _read_basis(layout.basis, positions_payload[cut:])
        return _from_codes(layout, codes, basis, dtype), basis

    def encode_backward(self, layout: LowRankLayout, gradient: Tensor, kept: Tensor | None, seed: int | None) -> Tensor:
        """Write the gradient's coordinates in the same subspace."""
        if kept is None:
            return encode_backward(layout.codes, gradient, None, seed)
        with _in_fp32(gradient):
            return encode_backward(layout.codes, _tokens(layout, gradient) @ kept, None, seed)

    def decode_backward(
        self, layout: LowRankLayout, payload: Tensor, kept: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Read the gradient from its coordinates."""
        codes = decode_backward(layout.codes, payload, None, torch.float32 if kept is not None else dtype)
        return codes.view(layout.shape) if kept is None else _from_codes(layout, codes, kept, dtype)

    def entries_sent(self, layout: LowRankLayout, kept: Tensor | None) -> int:
        """How many coordinates a payload holds."""
        return layout.codes.numel

    def _next_basis(self, tokens: Tensor, rank: int) -> Tensor:
        """One step of subspace iteration: an orthonormal basis, fp32 ``[width, rank]``."""
        width = tokens.shape[1]
        if self.training and not self._begun:
            self._in_use.resize_(self.basis.shape).copy_(self.basis)
            self._begun = True
        start = (self._in_use if self.training else self.basis).to(torch.float32)
        if start.shape[0] == width and start.shape[1] >= rank:
            # The iteration leaves the strongest directions first: annealing drops the weakest.
            start = start[:, :rank]
        else:
            seed = mixed_seed(self.seed, 0)
            start = uniform(width * rank, seed, EXPLORATION, tokens.new_zeros(1)).view(width, rank) - 0.5
        found = torch.linalg.qr(tokens.t() @ (tokens @ start)).Q
        if self.training:
            # One batch that is not finite must not spoil all that follow.
            usable = torch.where(found.isfinite().all(), found, start)
            self.basis.resize_(width, rank).copy_(usable)
        return found

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(prefix + "basis")
        if isinstance(saved, Tensor):
            self.basis.resize_(saved.shape)
        self._begun = False
        super()._load_from_state_dict(state_dict, prefix, *args)


def _tokens(layout: LowRankLayout, tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1, layout.width).to(torch.float32)


def _from_codes(layout: LowRankLayout, codes: Tensor, basis: Tensor, dtype: torch.dtype) -> Tensor:
    with _in_fp32(codes):
        return (codes @ basis.t()).view(layout.shape).to(dtype)


def _read_basis(layout: ActivationLayout, payload: Tensor) -> Tensor:
    return decode_values_at(layout, BASIS_FORMAT, payload, None, torch.float32).t()


def _in_fp32(tensor: Tensor) -> AbstractContextManager[Any]:
    """Keeps autocast from multiplying in fewer bits."""
    return torch.autocast(tensor.device.type, enabled=False)


@lru_cache(maxsize=64)
def _low_rank_layout(settings: SplitSettings, shape: tuple[int, ...]) -> LowRankLayout:
    width = shape[-1] if shape else 1
    rank = entries_at(settings.density, width)
    if rank == width:
        return LowRankLayout(shape, activation_layout(settings, shape, 1.0), None)
    tokens = 1
    for length in shape[:-1]:
        tokens *= length
    codes = activation_layout(settings, (tokens, rank), 1.0)
    return LowRankLayout(shape, codes, activation_layout(settings, (rank, width), 1.0))
