"""Finds masks of weights on a rank: tensors that the model keeps beside its weights, and weights
that stay zero.

Code that prunes or regrows weights often chooses them by the gradients of its own process. Under
``ddp`` these are the mean of all ranks. Here they are a rank's own, so the ranks choose
differently, and nothing fails: the shared weights then follow none of the masks. So ranks compare
what looks like a mask soon after the first steps, and now and then:

    before step 8, 16, 32, ...    what is a mask now
    before the step after it      which of these still are
    after the next exchange       the ranks compare them, together with the shared weights
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_dct.agreement import ZEROS_OF
from lightning_dct.sync.shared_weights import SharedWeights

# Steps before the first comparison. Their number doubles from one to the next.
FIRST_COMPARED = 8
# The least share of a tensor's entries that a mask sets to zero.
LEAST_MASKED = 0.01
# Tensors of fewer dimensions, such as the labels of a batch, may have the shape of some bias.
FEWEST_DIMENSIONS = 2
# Of torch's modules, which are listed by name already.
_LISTED = {"_parameters", "_buffers", "_modules"}


class Masks:
    """What looks like a mask on this rank.

    Args:
        model: Its weights are masked.

    Attributes:
        found: By name, True where a mask leaves a weight.
    """

    def __init__(self, model: Module) -> None:
        self._model = model
        self._next = FIRST_COMPARED
        self.found: dict[str, Tensor] = {}

    def look(self, steps: int, weights: SharedWeights, names: Iterable[str]) -> None:
        """Look for masks after so many steps, before the next one."""
        is_first = steps >= FIRST_COMPARED and steps & (steps - 1) == 0
        if not is_first and not self.found:
            return
        now = dict(self._kept_tensors())
        now |= {
            ZEROS_OF + name: kept
            for name in names
            if (kept := _where_not_set_to_zero(weights, name)) is not None
        }
        if is_first:
            self.found = now
        elif (steps - 1) & (steps - 2) == 0:
            self.found = {
                name: one
                for name, one in self.found.items()
                if name in now and torch.equal(one, now[name])
            }

    def is_due(self, steps: int) -> bool:
        """Whether the ranks compare themselves after an exchange in this step."""
        return steps > self._next

    def compared(self, steps: int) -> None:
        """Note a comparison in this step."""
        self.found = {}
        while self._next < steps:
            self._next *= 2

    def _kept_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Attributes of modules and parameters that have the shape of a weight, and zeros and
        ones.
        """
        shapes = {one.shape for one in self._model.parameters() if one.dim() >= FEWEST_DIMENSIONS}
        owners = chain(self._model.named_modules(), self._model.named_parameters())
        for prefix, owner in owners:
            for attribute, value in vars(owner).items():
                for key, tensor in _tensors_of(value) if attribute not in _LISTED else ():
                    if tensor.shape in shapes and _is_mask(tensor):
                        yield f"{prefix}.{attribute}{key}".lstrip("."), tensor.detach() != 0


def _tensors_of(value: Any) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or those in a list or a dict, by what follows the name."""
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"[{key!r}]", one) for key, one in items if isinstance(one, Tensor))


def _is_mask(tensor: Tensor) -> bool:
    if isinstance(tensor, Parameter) or tensor.layout != torch.strided or tensor.is_complex():
        return False
    return bool(((tensor == 0) | (tensor == 1)).all()) and bool((tensor == 0).any())


def _where_not_set_to_zero(weights: SharedWeights, name: str) -> Tensor | None:
    """False where this rank's own weights are exactly zero and the shared ones are not; None if
    that is nearly nowhere.

    Training leaves no such weights: a rank's own are the shared ones and what it has not sent.
    """
    own = weights.own(name)
    set_to_zero = (own == 0) & (weights.shared(name) != 0)
    return ~set_to_zero if int(set_to_zero.sum()) > LEAST_MASKED * own.numel() else None
