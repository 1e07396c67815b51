"""The plans that hold now: made of the settings, and of what callbacks have changed of densities."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_dct.config import DCTConfig
from lightning_dct.gradients.plan import BucketPlan, plan_bucket


class Plans:
    """Plans of buckets, each made once for as long as nothing changes.

    Args:
        config: The settings.
        link_traversals: See :func:`~lightning_dct.gradients.plan.plan_bucket`.

    Attributes:
        config: The settings of the moment.
    """

    def __init__(self, config: DCTConfig, link_traversals: float) -> None:
        self.config = config
        self._link_traversals = link_traversals
        self._known: dict[tuple[tuple[str, ...], tuple[int, ...], torch.dtype, float], BucketPlan] = {}

    def change(self, config: DCTConfig) -> None:
        """Plan by other settings from now on."""
        if config != self.config:
            self.config, self._known = config, {}

    def of(self, names: Sequence[str], sizes: Sequence[int], dtype: torch.dtype, share: float = 1.0) -> BucketPlan:
        """What becomes of some tensors, at a share of their densities; those that are 1 stay 1."""
        key = tuple(names), tuple(sizes), dtype, share
        if key not in self._known:
            full = [self.config.density_of(name) for name in names]
            densities = [1.0 if density == 1.0 else share * density for density in full]
            settings = self.config.value_format, self.config.min_tensor_size
            self._known[key] = plan_bucket(names, sizes, densities, dtype, *settings, self._link_traversals)
        return self._known[key]
