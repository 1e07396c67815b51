"""Refuses optimizer steps that the strategy does not see, because what they change would never be
exchanged.

Lightning's wrapper tells the strategy of each step. A step of the bare optimizer, or of one that
the LightningModule keeps to itself, passes it by: under ``ddp`` that does no harm, because
gradients are the same on all ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from lightning_dct.sync.updates import UpdateSynchronizer


class UnseenStepCheck:
    """Watches all optimizer steps of this process between :meth:`watch` and :meth:`stop`.

    Attributes:
        was_made: Whether the last step that was seen has changed weights: a loss scaler may have
            skipped it.
    """

    def __init__(self) -> None:
        self.was_made = False
        self._stepping: Optimizer | None = None
        self._synchronizers: Callable[[], Sequence[UpdateSynchronizer]] = tuple
        self._handle: RemovableHandle | None = None

    def watch(self, synchronizers: Callable[[], Sequence[UpdateSynchronizer]]) -> None:
        """Begin; ``synchronizers`` gives those that must see the steps of their parameters."""
        self.stop()
        self._synchronizers = synchronizers
        self._handle = register_optimizer_step_post_hook(self._check)

    def stop(self) -> None:
        """End."""
        if self._handle is not None:
            self._handle.remove()

    @contextmanager
    def seen(self, optimizer: Optimizer) -> Iterator[None]:
        """A step that the strategy sees."""
        before = self._stepping
        self._stepping = optimizer
        self.was_made = False
        try:
            yield
        finally:
            self._stepping = before

    def _check(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer is self._stepping:
            self.was_made = not is_skipped(optimizer)
            return
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for updates, parameter in product(self._synchronizers(), stepped):
            # Within a step that is seen, others may also step parameters that are exchanged
            # already.
            is_seen = self._stepping is not None and updates.takes_part(parameter)
            name = updates.parameter_names.get(parameter)
            # What is written into shared weights while they are shown is taken over.
            if (
                name is not None
                and parameter.grad is not None
                and not is_seen
                and not updates.views.are_open
            ):
                raise RuntimeError(
                    f"`{type(optimizer).__name__}` has stepped {name!r}, and the strategy has not"
                    " seen that step, so no rank would exchange it. Step what `self.optimizers()`"
                    " or `fabric.setup` returns, and return every optimizer from"
                    " `configure_optimizers`. Or use `compress='gradients'`."
                )


def is_skipped(optimizer: Optimizer) -> bool:
    """Whether a step that is called changes nothing, because of infinite gradients: fused ones are
    told by a scaler.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)
