"""Refuses optimizer steps that the strategy does not see, because what they change would never be exchanged.

Lightning's wrapper tells the strategy of each step. A step of the bare optimizer, or of one that the LightningModule
keeps to itself, passes it by: under ``ddp`` that does no harm, because gradients are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle


class StepGuard:
    """Watches all optimizer steps of this process between :meth:`watch` and :meth:`stop`."""

    def __init__(self) -> None:
        self._stepping: Optimizer | None = None
        self._names: Callable[[], Mapping[Tensor, str]] = dict
        self._takes_part: Callable[[Tensor], bool] = bool
        self._handle: RemovableHandle | None = None

    def watch(self, names: Callable[[], Mapping[Tensor, str]], takes_part: Callable[[Tensor], bool]) -> None:
        """Begin.

        Args:
            names: Gives the names of the parameters that may be exchanged.
            takes_part: Whether a parameter is exchanged already, so that others may step it, too, during a step.
        """
        self.stop()
        self._names, self._takes_part = names, takes_part
        self._handle = register_optimizer_step_post_hook(self._check)

    def stop(self) -> None:
        """End."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    @contextmanager
    def seen(self, optimizer: Optimizer) -> Iterator[None]:
        """A step that the strategy sees."""
        before, self._stepping = self._stepping, optimizer
        try:
            yield
        finally:
            self._stepping = before

    def _check(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer is self._stepping:
            return
        names = self._names()
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            is_seen = self._stepping is not None and self._takes_part(parameter)
            if parameter in names and parameter.grad is not None and not is_seen:
                raise RuntimeError(
                    f"`{type(optimizer).__name__}` has stepped {names[parameter]!r}, and the strategy has not seen that"
                    " step, so no rank would exchange it. Step what `self.optimizers()` or `fabric.setup` returns, and"
                    " return every optimizer from `configure_optimizers`. Or use `compress='gradients'`."
                )
