"""Whose weights and buffers are in the model: this rank's own, or those that all ranks share.

While a rank trains, from the start of a batch to the end of the optimizer's step, the model has the
rank's own. Everything else sees the shared ones, in *views*. Views may lie within each other. The
model has its own weights again when the last one is closed:

    with updates.views.shared(View.SAVE):
        ...  # the shared weights
        with updates.views.shared(View.LOAD):
            ...  # still
        ...  # still
    ...  # this rank's own, moved by what was written into the shared ones meanwhile

Lightning's hooks cannot keep a `with` open from one hook to another. They use :meth:`Views.open` and
:meth:`Views.close`. :meth:`Views.continue_training` closes all views, whatever has left them open.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

from lightning_dct.sync.buffers import Buffers
from lightning_dct.sync.shared_weights import SharedWeights


class View(Enum):
    """Who looks at the shared weights."""

    HOOKS = "hooks of callbacks and of the module, between two steps"
    EVALUATION = "a validation, or what the user evaluates"
    SAVE = "a checkpoint that is saved, or given to a rank that joins"
    LOAD = "a checkpoint that is loaded"
    END = "what comes after training"


class Views:
    """The stack of views that are open on a model.

    Args:
        weights: This rank's own and the shared ones.
        buffers: This rank's own and those of all ranks.
    """

    def __init__(self, weights: SharedWeights, buffers: Buffers) -> None:
        self._weights = weights
        self._buffers = buffers
        # From the outermost to the innermost one, each at most once.
        self._open: list[View] = []
        # The one that has the same buffers on all ranks, if any.
        self._with_buffers: View | None = None
        self._is_training = True

    def __contains__(self, view: View) -> bool:
        return view in self._open

    @property
    def are_open(self) -> bool:
        """Whether the model has the shared weights."""
        return bool(self._open)

    @contextmanager
    def shared(
        self, view: View, exchange_buffers: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Have the shared weights in the model within the context; see :meth:`open`."""
        is_outermost = view not in self
        self.open(view, exchange_buffers)
        try:
            yield
        finally:
            if is_outermost:
                self.close(view)

    def open(self, view: View, exchange_buffers: Callable[[], None] | None = None) -> None:
        """Put the shared weights into the model, if they are not there; nothing if the view is open.

        ``exchange_buffers``, a collective call, gives all ranks the same buffers, which the view
        then has, too.
        """
        if view in self:
            return
        self._is_training = False
        if exchange_buffers is not None:
            self._buffers.show(exchange_buffers)
            self._with_buffers = view
        self._open.append(view)
        self.follow()

    def follow(self) -> None:
        """Show also the shared weights of parameters that have come since a view was opened."""
        if self.are_open:
            self._weights.show()

    def close(self, view: View) -> None:
        """Put this rank's own weights back if no other view is open; nothing if this one is closed.

        Its own buffers come back if the view has exchanged them. What was written into the shared
        weights or buffers stays, unless it is taken back before training continues.
        """
        if view not in self:
            return
        self._open.remove(view)
        if not self.are_open:
            self._weights.hide()
        if view is self._with_buffers:
            self._buffers.give_back()

    def give_back_buffers(self) -> None:
        """Put this rank's own buffers back now: what is loaded into them stays if a view is closed."""
        self._buffers.continue_training()

    def continue_training(self) -> None:
        """Close all views: this rank's own weights and buffers are in the model, and change from now
        on.
        """
        if self._is_training:
            return
        self._is_training = True
        self._open.clear()
        self._weights.continue_training()
        self._buffers.continue_training()
