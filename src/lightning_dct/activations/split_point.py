"""`SplitPoint`: a module that marks where activations leave a rank, and sends only the largest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from lightning_dct.activations.codec import Encoded, decode_values_at, encode_forward, encode_values_at
from lightning_dct.activations.gradient_means import GradientMeans
from lightning_dct.activations.layout import ActivationLayout, activation_layout
from lightning_dct.activations.masking import explore, magnitudes_of, select, select_thresholds
from lightning_dct.activations.noise import EXPLORATION, FORWARD_ROUNDING, mixed_seed, uniform
from lightning_dct.activations.settings import SplitSettings
from lightning_dct.activations.split import Split
from lightning_dct.threshold import GUARD_RESELECT, SMALLEST_THRESHOLD, nudge_all
from lightning_dct.wire.bits import nonzero_indices

# The payload's capacity is the target, so the guard aims a little lower: an overflow costs a selection, and missing
# entries are sent as zeros.
GUARD_AIM = 0.97
# Entries of the activations that distinguish the exploration of micro-batches.
CONTENT_ENTRIES = 1 << 14


class SplitPoint(Split):
    """Sets all but the largest activations to zero; gradients come back for those only.

    ``M = |h| >= threshold``. Forward gives ``h * M`` and backward gives ``M * gradient``, both as read from the wire
    (Gupta et al., KDD 2021, section 3.2). In one process the module does the same without a wire, bit for bit. With
    ``select_by="magnitude_times_gradient"`` the threshold is on a score instead of ``|h|``: see
    :mod:`lightning_dct.activations.gradient_means`.

    A threshold is constant during an optimizer step, for all micro-batches and for a forward that activation
    checkpointing repeats. The guard's nudges take effect with :meth:`advance`.

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
        # The thresholds of the next step; 0 before the first selection.
        self.register_buffer("thresholds", torch.zeros(groups))
        # The thresholds of this step, and the entries that have reached them, summed over calls.
        self.register_buffer("_in_use", torch.zeros(groups), persistent=False)
        self.register_buffer("_reached", torch.zeros(groups, dtype=torch.int64), persistent=False)
        self.register_buffer("_overflows", torch.zeros((), dtype=torch.int64), persistent=False)
        # Entries and capacity of a group, summed over the same calls.
        self._entries = 0
        self._capacity = 0
        self._selected = False
        self._begun = False

    @property
    def overflows(self) -> int:
        """Training forwards so far in which more entries reached a threshold than the payload holds."""
        return int(self._overflows)

    @property
    def seed(self) -> int:
        """Start of all random choices, the same on both ends."""
        return self.settings.seed

    def layout(self, shape: torch.Size | tuple[int, ...]) -> ActivationLayout:
        """The layout of payloads for activations of a shape, fixed during a stage of warm-up.

        Raises:
            ValueError: The shape cannot be cut into the groups of the settings.
        """
        if self.training or self.settings.compress_evaluation:
            return activation_layout(self.settings, shape, self.annealed(self.settings.density))
        dense = replace(self.settings, forward_format="fp32", backward_format="fp32")
        return activation_layout(dense, shape, 1.0)

    def cross(self, layout: ActivationLayout, activations: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the receiver sees and keeps, in one process, without coding positions."""
        positions = self.select_positions(layout, activations)
        value_format, seed = layout.forward_format, self.rounding_seed
        payload = encode_values_at(layout, value_format, activations, positions, seed, FORWARD_ROUNDING)
        return decode_values_at(layout, value_format, payload, positions, activations.dtype), positions

    def encode_forward(self, activations: Tensor) -> Encoded:
        """Select and write activations."""
        layout = self.layout(activations.shape)
        positions = self.select_positions(layout, activations)
        return encode_forward(layout, activations, positions, self.rounding_seed)

    def decode_backward(
        self, layout: ActivationLayout, payload: Tensor, kept: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Read the gradient, and note it for the selection of later steps."""
        gradient = super().decode_backward(layout, payload, kept, dtype)
        if self.gradient_means is not None and self.training:
            self.gradient_means.observe(layout, gradient, kept)
        return gradient

    def select_positions(self, layout: ActivationLayout, activations: Tensor) -> Tensor | None:
        """The positions of the entries that are sent; in training this selects and nudges the thresholds.

        Returns:
            Shape ``[count]``, int64: ascending positions in the flattened tensor (on a GPU always ``layout.capacity``,
            padded with ``layout.numel``). None when everything is sent.

        Raises:
            TypeError: The activations are not floating-point numbers.
            ValueError: They have another number of groups than before.
        """
        if not activations.is_floating_point():
            raise TypeError(
                f"{self.name}: a SplitPoint compresses floating-point activations and was given {activations.dtype}."
                " Convert them, or pass them beside it."
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
        """Begin the step after ``completed_steps`` optimizer steps, with the nudged thresholds."""
        if completed_steps != self.completed_steps:
            self._begun = False
            if self.gradient_means is not None:
                self.gradient_means.fold()
        super().advance(completed_steps)

    def thresholds_in_use(self) -> list[float]:
        """The thresholds selected so far, one per group."""
        return self.thresholds.tolist() if self._selected else []

    def agreed_settings(self) -> dict[str, Any]:
        """The settings that must be the same on every rank, by name."""
        return asdict(self.settings)

    def get_extra_state(self) -> dict[str, Any]:
        """The clock, and the settings for which the thresholds were selected."""
        return {
            **super().get_extra_state(),
            "selected": self._selected,
            "density": float(self.settings.density),
            "select_by": self.settings.select_by,
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Continue the clock; request a refresh of thresholds for another density or other scores."""
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
                # In place: DistributedDataParallel keeps references to the buffers.
                buffer.resize_(layout.groups)
            self.thresholds.copy_(chosen)
            self._selected = True
            self._begin()
            self.refreshed()
        elif not self._selected:
            # Evaluation before the first training step uses this batch's own.
            return select_thresholds(magnitudes, layout.group_capacity)
        if not self.training:
            return self.thresholds
        if not self._begun:
            self._begin()
        return self._in_use

    def _begin(self) -> None:
        self._in_use.resize_(self.thresholds.shape).copy_(self.thresholds)
        self._reached.resize_(self.thresholds.shape).zero_()
        self._capacity = self._entries = 0
        self._begun = True

    def _observe(self, layout: ActivationLayout, reached: Tensor, cutoffs: Tensor) -> None:
        """Let the guard move the thresholds by the counts of a training forward."""
        self._overflows += (reached > layout.group_capacity).any()
        if not self.settings.guard:
            return
        self._reached += reached
        self._capacity += layout.group_capacity
        self._entries += layout.group_size
        nudged = nudge_all(self._in_use, self._reached, self._capacity, self._entries, GUARD_AIM)
        reselect = (reached > GUARD_RESELECT * layout.group_capacity) & cutoffs.isfinite()
        self.thresholds.copy_(torch.where(reselect, cutoffs, nudged))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SplitPoint:
        kept = {name: getattr(self, name) for name in ("thresholds", "_in_use")}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            # After `model.half()` and the like: a nudge by a hundredth needs the bits of an fp32.
            if getattr(self, name).dtype != torch.float32:
                setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(prefix + "thresholds")
        if isinstance(saved, Tensor) and self.settings.scope == "group" and self.settings.groups is None:
            # One group for each index: the first batch, or a checkpoint, gives their number.
            self.thresholds.resize_(saved.shape)
        if self.gradient_means is None:
            # They are of a run that selected by them.
            unused = prefix + "gradient_means."
            state_dict = {name: value for name, value in state_dict.items() if not name.startswith(unused)}
        super()._load_from_state_dict(state_dict, prefix, *args)
