"""`SplitPoint`: a module that marks where activations leave a rank, and sends only the largest of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from lightning_dct.activations.codec import (
    Encoded,
    decode_values_at,
    encode_forward,
    encode_values_at,
)
from lightning_dct.activations.gradient_means import GradientMeans
from lightning_dct.activations.layout import ActivationLayout, activation_layout
from lightning_dct.activations.masking import explore, magnitudes_of, select, select_thresholds
from lightning_dct.activations.noise import EXPLORATION, FORWARD_ROUNDING, mixed_seed, uniform
from lightning_dct.activations.settings import SplitSettings
from lightning_dct.activations.split import Split
from lightning_dct.threshold import GUARD_RESELECT, SMALLEST_THRESHOLD, nudge_all
from lightning_dct.wire.bits import nonzero_indices

# The payload has room for the target and no more, so the guard aims a little below: what does not fit is cut, which
# costs a selection, and what is missing is sent as zeros.
GUARD_AIM = 0.97
# The activations' entries that distinguish one micro-batch's exploration from the next.
CONTENT_ENTRIES = 1 << 14


class SplitPoint(Split):
    """Activations pass with all but their largest entries set to zero; gradients come back for those only.

    ``M = |h| >= threshold``; forward gives ``h * M`` as it is read from the wire, backward gives ``M * gradient`` as it
    is read from the wire (Gupta et al., KDD 2021, section 3.2). In one process the module does so without a wire, bit
    for bit. With ``select_by="magnitude_times_gradient"`` the threshold is on a score in place of ``|h|``: see
    :mod:`lightning_dct.activations.gradient_means`.

    A threshold stays as it is during an optimizer step, for all micro-batches and for a forward that activation
    checkpointing runs again; the guard's nudges take effect with :meth:`advance`.

    Args:
        density: Share of the activations that is sent, in (0, 1].
        **settings: The other attributes of :class:`~lightning_dct.activations.SplitSettings`, by name.

    Example:
        >>> split = SplitPoint(density=0.5, forward_format="fp32")
        >>> split(torch.tensor([[1.0, -3.0], [0.5, 2.0]]))
        tensor([[ 0., -3.],
                [ 0.,  2.]])
    """

    thresholds: Tensor
    _in_use: Tensor
    _reached: Tensor
    _overflows: Tensor

    def __init__(self, density: float = 0.05, **settings: Any) -> None:
        chosen = SplitSettings(density=density, **settings)
        super().__init__(chosen.refresh_every, chosen.warmup_steps, chosen.warmup_schedule)
        self.settings = chosen
        by_gradient = chosen.select_by == "magnitude_times_gradient"
        self.gradient_means = GradientMeans() if by_gradient else None
        groups = {"tensor": 1, "group": 1 if by_gradient else chosen.groups or 0, "sample": 0}[chosen.scope]
        # What the next step will use; 0 before the first selection.
        self.register_buffer("thresholds", torch.zeros(groups))
        # What this step uses, and how many entries have reached it in this step, summed over calls.
        self.register_buffer("_in_use", torch.zeros(groups), persistent=False)
        self.register_buffer("_reached", torch.zeros(groups, dtype=torch.int64), persistent=False)
        self.register_buffer("_overflows", torch.zeros((), dtype=torch.int64), persistent=False)
        # Of how many entries of a group that is, and for how many there was room, summed over the same calls.
        self._entries = 0
        self._room = 0
        self._selected = False
        self._begun = False

    @property
    def overflows(self) -> int:
        """Training forwards so far in which more entries reached a threshold than there was room for."""
        return int(self._overflows)

    @property
    def seed(self) -> int:
        """Start of all random choices, the same on both ends."""
        return self.settings.seed

    def layout(self, shape: torch.Size | tuple[int, ...]) -> ActivationLayout:
        """The layout of payloads for activations of a shape: fixed until warm-up enters its next stage.

        Args:
            shape: Shape of the activations.

        Raises:
            ValueError: The shape cannot be cut into the groups that the settings ask for.
        """
        if self.training or self.settings.compress_evaluation:
            return activation_layout(self.settings, shape, self.annealed(self.settings.density))
        dense = replace(self.settings, forward_format="fp32", backward_format="fp32")
        return activation_layout(dense, shape, 1.0)

    def cross(self, layout: ActivationLayout, activations: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the receiver sees and keeps, in one process, where positions need not be written."""
        positions = self.select_positions(layout, activations)
        value_format, seed = layout.forward_format, self.rounding_seed
        payload = encode_values_at(layout, value_format, activations, positions, seed, FORWARD_ROUNDING)
        return decode_values_at(layout, value_format, payload, positions, activations.dtype), positions

    def encode_forward(self, activations: Tensor) -> Encoded:
        """Select and write activations.

        Args:
            activations: Any shape, floating point.

        Returns:
            What crosses, and the positions to keep for :func:`~.codec.decode_backward`.
        """
        layout = self.layout(activations.shape)
        positions = self.select_positions(layout, activations)
        return encode_forward(layout, activations, positions, self.rounding_seed)

    def decode_backward(
        self, layout: ActivationLayout, payload: Tensor, kept: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Read the gradient, and let the next steps' selection know of it."""
        gradient = super().decode_backward(layout, payload, kept, dtype)
        if self.gradient_means is not None and self.training:
            self.gradient_means.observe(layout, gradient, kept)
        return gradient

    def select_positions(self, layout: ActivationLayout, activations: Tensor) -> Tensor | None:
        """Where the entries are that are sent; in training this selects and nudges the thresholds.

        Args:
            layout: The layout of the activations.
            activations: Shape ``layout.shape``, floating point.

        Returns:
            Shape ``[count]``, int64: ascending places in the flattened tensor (on a GPU as many as there is room for,
            filled up with ``layout.numel``). None when everything is sent.

        Raises:
            TypeError: The activations are no real numbers.
            ValueError: They have another number of groups than before.
        """
        if not activations.is_floating_point():
            raise TypeError(
                f"{self.name}: a SplitPoint compresses floating-point activations and was given {activations.dtype}."
                " Convert them, or let them pass beside it."
            )
        if layout.sends_everything:
            return None
        with torch.no_grad():
            magnitudes = magnitudes_of(activations)
            if self.gradient_means is not None:
                magnitudes = self.gradient_means.weigh(layout, magnitudes)
            magnitudes = layout.by_group(magnitudes)
            thresholds = self._thresholds_for(layout, magnitudes)
            selected = select(magnitudes, thresholds, layout.group_capacity)
            if self.training and self.settings.scope != "sample":
                self._observe(layout, *selected[1:])
            mask = layout.flat(selected.mask)
            if self.training and layout.explored:
                sample = activations.reshape(-1)[:: 1 + layout.numel // CONTENT_ENTRIES]
                seed = mixed_seed(self.settings.seed, self.completed_steps)
                mask = mask.index_fill(0, explore(uniform(layout.explored, seed, EXPLORATION, sample), layout.numel), 1)
            if mask.device.type == "cpu":
                return nonzero_indices(mask)
            return torch.nonzero_static(mask, size=layout.capacity, fill_value=layout.numel).squeeze(1)

    def advance(self, completed_steps: int) -> None:
        """Begin the step that follows ``completed_steps`` optimizer steps, with the thresholds as nudged so far."""
        if completed_steps != self.completed_steps:
            self._begun = False
            if self.gradient_means is not None:
                self.gradient_means.fold()
        super().advance(completed_steps)

    def thresholds_in_use(self) -> list[float]:
        """The thresholds selected so far, one a group."""
        return self.thresholds.tolist() if self._selected else []

    def agreed_settings(self) -> dict[str, Any]:
        """The settings that must be the same on every rank, by name."""
        return asdict(self.settings)

    def get_extra_state(self) -> dict[str, Any]:
        """The clock, and what the thresholds were selected for."""
        return {
            **super().get_extra_state(),
            "selected": self._selected,
            "density": float(self.settings.density),
            "select_by": self.settings.select_by,
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Continue the clock; thresholds for another density, or of other scores, are selected anew."""
        super().set_extra_state(state)
        self._selected = bool(state["selected"])
        self.refresh_requested |= float(state["density"]) != self.settings.density
        self.refresh_requested |= state.get("select_by", "magnitude") != self.settings.select_by
        self._begun = False

    def extra_repr(self) -> str:
        """The settings, for ``print(model)``."""
        return ", ".join(f"{name}={value!r}" for name, value in asdict(self.settings).items())

    def _thresholds_for(self, layout: ActivationLayout, magnitudes: Tensor) -> Tensor:
        """This call's thresholds, shape ``[groups]``, on magnitudes or on scores."""
        if self.settings.scope == "sample":
            return magnitudes.new_full((layout.groups,), SMALLEST_THRESHOLD)
        if self._selected and self.thresholds.numel() != layout.groups:
            raise ValueError(
                f"{self.name}: the activations (shape {list(layout.shape)}) have {layout.groups} groups and"
                f" {self.thresholds.numel()} thresholds are remembered. Choose a `group_dim` of constant length, set"
                " `groups`, or use a split point for each kind of activations."
            )
        if self.training and self.refresh_requested:
            chosen = select_thresholds(magnitudes, layout.group_capacity)
            for buffer in (self.thresholds, self._in_use, self._reached):
                # In place: DistributedDataParallel holds on to the buffers it was given.
                buffer.resize_(layout.groups)
            self.thresholds.copy_(chosen)
            self._selected = True
            self._begin()
            self.refreshed()
        elif not self._selected:
            # Evaluation before the first training step: this batch's own.
            return select_thresholds(magnitudes, layout.group_capacity)
        if not self.training:
            return self.thresholds
        if not self._begun:
            self._begin()
        return self._in_use

    def _begin(self) -> None:
        self._in_use.resize_(self.thresholds.shape).copy_(self.thresholds)
        self._reached.resize_(self.thresholds.shape).zero_()
        self._room = self._entries = 0
        self._begun = True

    def _observe(self, layout: ActivationLayout, reached: Tensor, cutoffs: Tensor) -> None:
        """Let the guard see what a training forward has shown."""
        self._overflows += (reached > layout.group_capacity).any()
        if not self.settings.guard:
            return
        self._reached += reached
        self._room += layout.group_capacity
        self._entries += layout.group_size
        nudged = nudge_all(self._in_use, self._reached, self._room, self._entries, GUARD_AIM)
        reselect = (reached > GUARD_RESELECT * layout.group_capacity) & cutoffs.isfinite()
        self.thresholds.copy_(torch.where(reselect, cutoffs, nudged))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SplitPoint:
        kept = {name: getattr(self, name) for name in ("thresholds", "_in_use")}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            # `model.half()` and the like: a threshold in few bits could not be nudged by a hundredth.
            if getattr(self, name).dtype != torch.float32:
                setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(prefix + "thresholds")
        if isinstance(saved, Tensor) and self.settings.scope == "group" and self.settings.groups is None:
            # One group for each index: how many there are is known from the first batch or, as here, a checkpoint.
            self.thresholds.resize_(saved.shape)
        if self.gradient_means is None:
            # Of a run that selected by them.
            unused = prefix + "gradient_means."
            state_dict = {name: value for name, value in state_dict.items() if not name.startswith(unused)}
        super()._load_from_state_dict(state_dict, prefix, *args)
