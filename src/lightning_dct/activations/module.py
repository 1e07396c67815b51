"""The interface between modules that compress what ranks exchange, and strategies and callbacks."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from torch import nn

from lightning_dct.config import check_integer
from lightning_dct.traffic import Traffic

Kind = TypeVar("Kind", bound=nn.Module)


def modules_of(model: nn.Module, kind: type[Kind]) -> dict[str, Kind]:
    """A model's modules of a kind, by the names that they have without ``torch.compile``."""
    return {
        plain_name(name): module
        for name, module in model.named_modules()
        if isinstance(module, kind)
    }


def module_settings(model: nn.Module) -> dict[str, Any]:
    """The settings of split points and sharded tables that all ranks must have alike, by name of
    module and setting.
    """
    return {
        f"{name}.{setting}": value
        for name, module in modules_of(model, CompressedModule).items()
        for setting, value in module.agreed_settings().items()
    }


def plain_name(name: str) -> str:
    """A module's or parameter's name without the prefixes of ``torch.compile``."""
    return name.replace("_orig_mod.", "")


class CompressedModule(nn.Module):
    """A module that compresses what ranks exchange in its forward and backward, with its own
    thresholds.

    :class:`~lightning_dct.ThresholdRefresh` (which ``DCTStrategy`` adds) calls :meth:`advance`
    before every training batch. In your own loop, call it yourself: without it thresholds are
    selected only once.

    Args:
        refresh_every: Optimizer steps between two exact selections of the thresholds.
    """

    # The names of the settings that must be the same on every rank.
    agreed: ClassVar[tuple[str, ...]] = ("refresh_every",)

    def __init__(self, refresh_every: int) -> None:
        super().__init__()
        check_integer("refresh_every", refresh_every, minimum=1)
        self.refresh_every = refresh_every
        # Its name in the model, for messages; set by the strategy.
        self.name = type(self).__name__
        # Counts bytes and time; replaced by the strategy's counter.
        self.traffic = Traffic()
        self.completed_steps = 0
        self.refreshed_at = 0
        # Whether the next training forward selects all thresholds.
        self.refresh_requested = True

    def advance(self, completed_steps: int) -> None:
        """Set the number of completed optimizer steps, the same on every rank, before the next
        batch.
        """
        restarted = completed_steps < self.completed_steps  # another fit
        self.completed_steps = completed_steps
        if restarted or completed_steps - self.refreshed_at >= self.refresh_every:
            self.refresh_requested = True

    def refreshed(self) -> None:
        """Record that all thresholds were selected; subclasses call this."""
        self.refresh_requested = False
        self.refreshed_at = self.completed_steps
        self.traffic.add(refreshes=1)

    def thresholds_in_use(self) -> list[float]:
        """All thresholds selected so far, in no particular order, for logging."""
        return []

    def residual_norm(self) -> float:
        """Euclidean norm of this rank's residuals; 0 where there are none."""
        return 0.0

    def agreed_settings(self) -> dict[str, Any]:
        """The settings that must be the same on every rank, by name, as plain values."""
        return {name: getattr(self, name) for name in self.agreed}

    def compression_state(self) -> dict[str, Any]:
        """This rank's state beside the model's: plain numbers, dicts and CPU tensors."""
        return {}

    def load_compression_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from this rank's state, or from the states of all ranks of another world
        size.
        """

    def get_extra_state(self) -> dict[str, Any]:
        """The clock, which is part of the model's ``state_dict``."""
        return {
            name: getattr(self, name)
            for name in ("completed_steps", "refreshed_at", "refresh_requested")
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the clock."""
        self.completed_steps = int(state["completed_steps"])
        self.refreshed_at = int(state["refreshed_at"])
        self.refresh_requested = bool(state["refresh_requested"])
