"""A rank's error feedback: the residuals and thresholds between synchronisations.

A synchronisation can be undone.

A rank keeps two kinds of residuals, both in the units of its own unscaled gradients:

    residuals   what it has not sent of its own gradients, by parameter
    owned       what it has not sent of the *sums* it owns, by piece (exchanges that divide the model among ranks)

Both enter the mean over ``W`` ranks with a weight of ``1 / W``. So if a piece gets another owner,
because of other settings or another exchange, the old owner's residual of the sum becomes a
residual of its own gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dct.compress.awaited import Awaited, read_together
from lightning_dct.compress.bucket_plan import BucketPlan, OwnedPiece
from lightning_dct.compress.threshold import Thresholds


class Residuals:
    """One rank's residuals by parameter name, in flat buffers with the layout of the gradient
    buckets.

    DistributedDataParallel rebuilds its buckets after the first backward, in another order.
    Residuals by bucket number would then be added to the wrong parameters.
    """

    def __init__(self) -> None:
        self._views: dict[str, Tensor] = {}
        self._flat: dict[tuple[str, ...], Tensor] = {}

    def flat(
        self, names: Sequence[str], sizes: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The residual of a bucket, shape ``[sum(sizes)]``, to be written in place; zeros where
        there was none.
        """
        # The buffer stays the same as long as the bucket holds the same parameters.
        key = tuple(names)
        if key not in self._flat:
            flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
            for name, view in zip(names, flat.split(list(sizes)), strict=True):
                if name in self._views:
                    view.copy_(self._views[name])
                self._views[name] = view
            # Buffers that have lost a residual to this one are no longer valid.
            moved = set(names)
            self._flat = {
                old: buffer for old, buffer in self._flat.items() if not moved.intersection(old)
            }
            self._flat[key] = flat
        return self._flat[key]

    def view(self, name: str) -> Tensor | None:
        """The residual of one name, shape ``[size]``, to be written in place; None if there is
        none.
        """
        return self._views.get(name)

    def drop(self, name: str) -> None:
        """Delete the residual of one name."""
        del self._views[name]
        self._flat = {names: buffer for names, buffer in self._flat.items() if name not in names}

    def norms(self) -> dict[str, float]:
        """Euclidean norm of each residual, by name."""
        return read_together(
            {name: view.norm(dtype=torch.float64) for name, view in self._views.items()}
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Each residual by parameter name: 1-D tensors on the CPU, copies.

        Parameters without entries have none.
        """
        return {
            name: view.detach().to("cpu", copy=True)
            for name, view in self._views.items()
            if view.numel()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue with saved residuals; :meth:`flat` lays out the buffers."""
        self._views = {name: tensor.detach().clone().flatten() for name, tensor in state.items()}
        self._flat = {}


@dataclass(eq=False)
class ErrorFeedback:
    """One rank's residuals and thresholds."""

    pieces: Mapping[str, OwnedPiece]  # those this rank owns, by label
    adapt_threshold: (
        bool  # whether to adjust the thresholds to the number of entries that have reached them
    )
    undoable: bool  # whether to keep what a synchronisation changes
    kernel: str = "auto"  # see `kernels.cpu_kernel`
    of_updates: bool = (
        False  # whether updates are exchanged: then ranks keep what an owner does not send of a sum
    )

    def __post_init__(self) -> None:
        self.thresholds = Thresholds()
        self.residuals = Residuals()
        self.owned = Residuals()
        # What is exchanged, for messages.
        self.label = "Updates" if self.of_updates else "Gradients"
        # Whether the current synchronisation has selected any threshold.
        self.selected = False
        # Numbers that GPUs have not delivered yet.
        self.awaited = Awaited()
        self._labels: dict[str, list[str]] = {}
        for label, piece in self.pieces.items():
            self._labels.setdefault(piece.name, []).append(label)
        # Of the current synchronisation: residuals to delete at its end, and what undoes it.
        self._to_drop: list[str] = []
        self._undo: list[tuple[Tensor, Tensor]] = []
        self._undo_thresholds = Thresholds()

    def begin(self, refresh: bool = False) -> None:
        """Begin a synchronisation; with ``refresh``, select each threshold anew when its tensor
        next takes part.
        """
        self.selected = False
        if self.undoable:
            self._undo_thresholds.take_over(self.thresholds)
        if refresh:
            self.thresholds.forget()

    def commit(self) -> None:
        """End a synchronisation and keep its changes."""
        for name in self._to_drop:
            self.residuals.drop(name)
        self._to_drop = []
        self._undo = []

    def roll_back(self) -> None:
        """End a synchronisation and undo its changes."""
        for residual, before in reversed(self._undo):
            residual.copy_(before)
        self.thresholds.take_over(self._undo_thresholds)
        self._to_drop = []
        self._undo = []

    def residual_of(self, bucket: BucketPlan, device: torch.device) -> Tensor:
        """The residual of this rank's own gradients of a bucket: shape ``[n]``, to be written in
        place.
        """
        return self._changing(
            self.residuals.flat(bucket.names, bucket.sizes, bucket.residual_dtype, device)
        )

    def owned_of(self, shard: BucketPlan, device: torch.device) -> Tensor:
        """The residual of the sums this rank owns of a bucket: shape ``[n]``, to be written in
        place.
        """
        return self._changing(
            self.owned.flat(shard.names, shard.sizes, shard.residual_dtype, device)
        )

    def send_out(
        self, buffer: Tensor, plan: BucketPlan, deferred: set[int], scale: float, owned: bool
    ) -> None:
        """Move the residuals of a bucket's tensors, except deferred ones, into the bucket, which is
        sent uncompressed.

        Such residuals come from other settings: a lower density, or another exchange. ``scale`` is
        the factor on what the bucket has. ``owned`` includes the residuals of sums. Without it,
        this rank stops keeping residuals of its own gradients, and their memory is freed.
        """
        for index, (name, (start, _)) in enumerate(zip(plan.names, plan.bounds, strict=True)):
            if index in deferred:
                continue
            sources = [(self.residuals, name, 0)]
            if owned:
                sources += [
                    (self.owned, label, self.pieces[label].start)
                    for label in self._labels.get(name, ())
                ]
            for residuals, key, offset in sources:
                left = residuals.view(key)
                if left is None:
                    continue
                first = start + offset
                buffer[first : first + left.numel()].add_(left.to(buffer.device), alpha=1.0 / scale)
                self._changing(left).zero_()
                if not owned:
                    self._to_drop.append(key)

    def norms(self) -> dict[str, float]:
        """Euclidean norm of both kinds of residuals together, by parameter."""
        squares = {name: norm**2 for name, norm in self.residuals.norms().items()}
        for label, norm in self.owned.norms().items():
            name = self.pieces[label].name
            squares[name] = squares.get(name, 0.0) + norm**2
        return {name: square**0.5 for name, square in squares.items()}

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, dicts and CPU tensors: residuals by parameter, those of sums by parameter
        and first entry.
        """
        owned: dict[str, dict[int, Tensor]] = {}
        for label, residual in self.owned.state_dict().items():
            piece = self.pieces[label]
            owned.setdefault(piece.name, {})[piece.start] = residual
        residuals = self.residuals.state_dict()
        return {"thresholds": self.thresholds.state_dict(), "residuals": residuals, "owned": owned}

    def load_state_dict(self, state: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Continue from a saved state; ``sizes`` are the entries of each of the model's parameters.

        Raises:
            ValueError: A saved residual does not fit the parameter of its name.
        """
        residuals: dict[str, Tensor] = dict(state["residuals"])
        for name, residual in residuals.items():
            _check_size(name, residual.numel(), sizes, partial=False)
        kept = {}
        for name, parts in state["owned"].items():
            _check_size(name, pieces_extent(parts), sizes, partial=True)
            lost = dict(parts)
            for label in self._labels.get(name, ()):
                piece = self.pieces[label]
                if piece.start in lost and lost[piece.start].numel() == piece.stop - piece.start:
                    kept[label] = lost.pop(piece.start)
            if lost:
                if name in residuals:
                    own = residuals[name].clone()
                else:
                    own = next(iter(lost.values())).new_zeros(
                        max(sizes.get(name, 0), pieces_extent(lost))
                    )
                residuals[name] = add_pieces(own, lost)
        self.thresholds.load_state_dict(state["thresholds"])
        self.residuals.load_state_dict(residuals)
        self.owned.load_state_dict(kept)

    def _changing(self, residual: Tensor) -> Tensor:
        if self.undoable:
            self._undo.append((residual, residual.clone()))
        return residual


def _check_size(name: str, entries: int, sizes: Mapping[str, int], partial: bool) -> None:
    expected = sizes.get(name, entries)
    if entries > expected or (entries < expected and not partial):
        raise ValueError(
            f"The checkpoint's residual of parameter {name!r} has {entries} entries, the model's"
            f" parameter has {expected}. Resume with the model that was saved."
        )


def pieces_extent(pieces: Mapping[int, Tensor]) -> int:
    """The end of the last of some pieces of a tensor, given by first entry."""
    return max(start + piece.numel() for start, piece in pieces.items())


def add_pieces(residual: Tensor, pieces: Mapping[int, Tensor]) -> Tensor:
    """Add pieces, given by first entry, to a residual (shape ``[size]``) in place, and return
    it.
    """
    for start, piece in pieces.items():
        residual[start : start + piece.numel()] += piece
    return residual
