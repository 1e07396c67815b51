"""Whether the next synchronisation sends nothing, and how large the gradients were, by which that is decided."""

from __future__ import annotations

import torch
from torch import Tensor


class Holding:
    """What is known of steps in which the whole gradient joins what is held back.

    Attributes:
        back: Whether the next synchronisation sends nothing. The same on every rank.
        in_a_row: Synchronisations that have sent nothing since the last that has sent.
    """

    def __init__(self) -> None:
        self.back = False
        self.in_a_row = 0
        self._squares: list[Tensor] = []

    def measure(self, gradient: Tensor) -> None:
        """Take note of the size of a bucket.

        Args:
            gradient: Shape ``[n]``: the flattened bucket. Not changed.

        Raises:
            ValueError: It is sparse: nothing is held back of such gradients.
        """
        if gradient.is_sparse:
            raise ValueError(
                "`EventTriggeredSending` does not work with sparse gradients, of which nothing can be held back. Use"
                " `Embedding(sparse=False)`, or remove the callback."
            )
        self._squares.append(gradient.norm(dtype=torch.float64).square())

    def measured(self) -> Tensor:
        """The sum of squares of all that was measured since this was last asked for: shape ``[]``, fp64."""
        squares, self._squares = self._squares, []
        return torch.stack(squares).sum()
