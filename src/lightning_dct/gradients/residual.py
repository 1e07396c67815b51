"""Residuals: what was not sent, by parameter name, in flat buffers with the layout of the gradient buckets.

DistributedDataParallel rebuilds its buckets after the first backward, in another order. Residuals by bucket number
would then be added to the wrong parameters, without an error if the sizes match. So residuals are kept by name, and a
bucket's flat buffer is laid out again when the bucket's names change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Residuals:
    """One rank's residuals."""

    def __init__(self) -> None:
        self._views: dict[str, Tensor] = {}
        self._flat: dict[tuple[str, ...], Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._views

    def flat(self, names: Sequence[str], sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The residual of a bucket, shape ``[sum(sizes)]``, to be written in place; zeros where there was none.

        The buffer stays the same as long as the bucket holds the same parameters. Otherwise their residuals move into a
        new one of this dtype (fp32 or fp64) on this device.
        """
        key = tuple(names)
        if key not in self._flat:
            flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
            for name, view in zip(names, flat.split(list(sizes)), strict=True):
                if name in self._views:
                    view.copy_(self._views[name])
                self._views[name] = view
            # Buffers that have lost a residual to this one are no longer valid.
            moved = set(names)
            self._flat = {old: buffer for old, buffer in self._flat.items() if not moved.intersection(old)}
            self._flat[key] = flat
        return self._flat[key]

    def view(self, name: str) -> Tensor | None:
        """The residual of one name, shape ``[size]``, to be written in place; None if there is none."""
        return self._views.get(name)

    def drop(self, name: str) -> None:
        """Delete the residual of one name."""
        del self._views[name]
        self._flat = {names: buffer for names, buffer in self._flat.items() if name not in names}

    def norms(self) -> dict[str, float]:
        """Euclidean norm of each residual, by name."""
        return {name: float(view.norm(dtype=torch.float64)) for name, view in self._views.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Each residual by parameter name: 1-D tensors on the CPU, copies. Parameters without entries have none."""
        return {name: view.detach().to("cpu", copy=True) for name, view in self._views.items() if view.numel()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue with saved residuals; :meth:`flat` lays out the buffers."""
        self._views = {name: tensor.detach().clone().flatten() for name, tensor in state.items()}
        self._flat = {}


def pieces_extent(pieces: Mapping[int, Tensor]) -> int:
    """The end of the last of some pieces of a tensor, which are given by first entry."""
    return max(start + piece.numel() for start, piece in pieces.items())


def add_pieces(residual: Tensor | None, pieces: Mapping[int, Tensor], size: int) -> Tensor:
    """A new tensor: a residual (shape ``[size]``, None for zeros) plus pieces, given by first entry.

    Without a residual it is longer than ``size`` if the pieces extend further.
    """
    if residual is None:
        total = next(iter(pieces.values())).new_zeros(max(size, pieces_extent(pieces)))
    else:
        total = residual.clone()
    for start, piece in pieces.items():
        total[start : start + piece.numel()] += piece
    return total
