"""The plans that hold now: made of the settings, the stage of warm-up, and what callbacks have changed of densities."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_dct.config import DCTConfig
from lightning_dct.gradients.plan import BucketPlan, plan_bucket


class Plans:
    """Plans of buckets, each made once for as long as nothing changes.

    Args:
        config: The settings.
        passes: See :func:`~lightning_dct.gradients.plan.plan_bucket`.

    Attributes:
        config: The settings of the moment.
    """

    def __init__(self, config: DCTConfig, passes: float) -> None:
        self.config = config
        self._passes = passes
        # By what is planned; with the stage of warm-up that it holds for.
        self._known: dict[tuple[tuple[str, ...], tuple[int, ...], torch.dtype], tuple[int, BucketPlan]] = {}

    def change(self, config: DCTConfig) -> None:
        """Plan by other settings from now on."""
        if config != self.config:
            self.config, self._known = config, {}

    def of(self, names: Sequence[str], sizes: Sequence[int], dtype: torch.dtype, step: int) -> BucketPlan:
        """What becomes of some tensors after so many optimizer steps."""
        key, stage = (tuple(names), tuple(sizes), dtype), self.config.warmup_stage(step)
        if key not in self._known or self._known[key][0] != stage:
            densities = [self.config.density_of(name, stage) for name in names]
            self._known[key] = (stage, self._plan(names, sizes, dtype, densities))
        return self._known[key][1]

    def _plan(
        self, names: Sequence[str], sizes: Sequence[int], dtype: torch.dtype, densities: Sequence[float]
    ) -> BucketPlan:
        settings = self.config.value_format, self.config.min_tensor_size
        return plan_bucket(names, sizes, densities, dtype, *settings, self._passes)
