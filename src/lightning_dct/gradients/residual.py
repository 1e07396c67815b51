"""Residuals: what was not sent, kept by parameter name in buffers that lie as the gradient buckets lie.

DistributedDataParallel builds its buckets anew after the first backward, in another order. A residual kept by bucket
number would then be added to the wrong parameters, without an error when the sizes happen to match. Here the name of
the parameter is what counts; the flat buffer a bucket needs is laid out afresh whenever the bucket's names change.
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
        """The residual of a bucket.

        Args:
            names: The bucket's parameters in the bucket's order.
            sizes: How many entries each has.
            dtype: The dtype of a buffer made anew, fp32 or fp64.
            device: Where it is made.

        Returns:
            Shape ``[sum(sizes)]``; written in place by the caller. The same buffer comes back as long as the bucket
            holds the same parameters; otherwise their residuals move into a new one.
        """
        key = tuple(names)
        if key not in self._flat:
            flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
            for name, view in zip(names, flat.split(list(sizes)), strict=True):
                if name in self._views:
                    view.copy_(self._views[name])
                self._views[name] = view
            # A buffer is of use only while it holds the residuals of all its names: forget the ones just emptied.
            moved = set(names)
            self._flat = {old: buffer for old, buffer in self._flat.items() if not moved.intersection(old)}
            self._flat[key] = flat
        return self._flat[key]

    def of(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The residual of one name, shape ``[size]``, to be written in place: where it lies, else one of zeros."""
        left = self.view(name)
        return self.flat((name,), (size,), dtype, device) if left is None else left

    def view(self, name: str) -> Tensor | None:
        """The residual of one name, shape ``[size]``, to be written in place; None when there is none."""
        return self._views.get(name)

    def drop(self, name: str) -> None:
        """Forget the residual of one name."""
        del self._views[name]
        self._flat = {names: buffer for names, buffer in self._flat.items() if name not in names}

    def norm(self) -> float:
        """Euclidean norm over all entries of all residuals."""
        return float(sum(norm**2 for norm in self.norms().values()) ** 0.5)

    def norms(self) -> dict[str, float]:
        """Euclidean norm of each residual, by name."""
        return {name: float(view.norm(dtype=torch.float64)) for name, view in self._views.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Each residual by parameter name: 1-D tensors on the CPU, copies. Parameters without entries have none."""
        return {name: view.detach().to("cpu", copy=True) for name, view in self._views.items() if view.numel()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over saved residuals; buffers are laid out again when they are next asked for."""
        self._views = {name: tensor.detach().clone().flatten() for name, tensor in state.items()}
        self._flat = {}


def pieces_extent(pieces: Mapping[int, Tensor]) -> int:
    """One after the last entry of a tensor of which there are these pieces, by first entry."""
    return max(start + piece.numel() for start, piece in pieces.items())


def add_pieces(residual: Tensor | None, pieces: Mapping[int, Tensor], size: int) -> Tensor:
    """A tensor's residual with some pieces added in their places, as a new tensor.

    Args:
        residual: Shape ``[size]``, or None for zeros.
        pieces: 1-D tensors by their first entry.
        size: Entries of the tensor; more if the pieces reach further.
    """
    if residual is None:
        some = next(iter(pieces.values()))
        residual = some.new_zeros(max(size, pieces_extent(pieces)))
    total = residual.clone()
    for start, piece in pieces.items():
        total[start : start + piece.numel()] += piece
    return total
