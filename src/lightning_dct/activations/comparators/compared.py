"""What the methods to compare with share: which of a split point's settings they have, and their clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from lightning_dct.activations.settings import SplitSettings
from lightning_dct.activations.split import LayoutT, Split

FORMATS = ("forward_format", "backward_format", "compress_evaluation", "seed")
ANNEALING = ("warmup_steps", "warmup_schedule")


class Compared(Split[LayoutT]):
    """A method without thresholds.

    Args:
        density: Share of the activations' entries that is sent, in (0, 1].
        **settings: Of the attributes of :class:`~lightning_dct.activations.SplitSettings`: ``forward_format``,
            ``backward_format``, ``warmup_steps``, ``warmup_schedule``, ``compress_evaluation`` and ``seed``.

    Raises:
        TypeError: A setting is none of these, or has the wrong type.
        ValueError: A setting is out of range.
    """

    def __init__(self, density: float = 0.05, **settings: Any) -> None:
        chosen = chosen_settings(type(self).__name__, density, settings, (*FORMATS, *ANNEALING))
        super().__init__(chosen.refresh_every, chosen.warmup_steps, chosen.warmup_schedule)
        self.settings = chosen

    @property
    def seed(self) -> int:
        """Start of all random choices, the same on both ends."""
        return self.settings.seed

    @property
    def settings_now(self) -> SplitSettings:
        """The settings at this step: with the annealed density, or nothing compressed in evaluation."""
        if self.training or self.settings.compress_evaluation:
            return replace(self.settings, density=self.annealed(self.settings.density))
        return replace(self.settings, density=1.0, forward_format="fp32", backward_format="fp32")

    def agreed_settings(self) -> dict[str, Any]:
        """The settings that must be the same on every rank, by name."""
        return {"kind": type(self).__name__, **asdict(self.settings)}

    def extra_repr(self) -> str:
        """The settings, for ``print(model)``."""
        names = ("density", *FORMATS, *ANNEALING)
        return ", ".join(f"{name}={getattr(self.settings, name)!r}" for name in names)


def chosen_settings(kind: str, density: float, given: dict[str, Any], names: Iterable[str]) -> SplitSettings:
    """The settings of a method that does not have all of them.

    Raises:
        TypeError: One is given that it does not have.
    """
    for name in given:
        if name not in names:
            raise TypeError(f"`{name}` is no setting of {kind}, which takes `density`, `{'`, `'.join(names)}`.")
    return SplitSettings(density=density, **given)
