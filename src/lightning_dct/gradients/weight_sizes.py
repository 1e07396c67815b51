"""How large weights are, measured now and then and remembered across restarts: what a step is large or small beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class WeightSizes:
    """The sizes of groups of weights.

    A group's size is the root mean square of its middle tensor: half of all entries are in tensors no larger. So
    neither embeddings that begin at 1 nor matrices that begin at 0 decide for the rest.

    Args:
        every: Steps after which a group is measured again. That reads all of its weights, and waits for a GPU.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        # Size and the step it was measured in, by the name of the group's first tensor.
        self._measured: dict[str, tuple[float, int]] = {}

    def of(self, tensors: Mapping[str, Tensor], step: int) -> float:
        """The size of a group of tensors, by name, in a step; 0 for no tensors."""
        if not tensors:
            return 0.0
        label = next(iter(tensors))
        size, since = self._measured.get(label, (0.0, None))
        if since is None or step - since >= self._every:
            size = middle_size(list(tensors.values()))
            self._measured[label] = (size, step)
        return size

    def state_dict(self) -> dict[str, Any]:
        """What was measured. A run that is resumed between two measurements goes on with the same."""
        return {label: list(measured) for label, measured in self._measured.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._measured = {label: (float(size), int(step)) for label, (size, step) in state.items()}


def middle_size(tensors: Sequence[Tensor]) -> float:
    """The root mean square of the middle one of some tensors, in the order of it, each as often as it has entries."""
    with torch.no_grad():
        on_devices = [torch.linalg.vector_norm(tensor).float() for tensor in tensors]
        # One wait for all of them, where they are on a GPU.
        norms = torch.stack([norm.to(on_devices[0].device) for norm in on_devices]).tolist()
    entries = [tensor.numel() for tensor in tensors]
    below = 0
    for size, count in sorted((norm / max(count, 1) ** 0.5, count) for norm, count in zip(norms, entries, strict=True)):
        below += count
        if 2 * below >= sum(entries):
            return size
    return 0.0
