"""What crosses each border between two pieces: shape and dtype, traced on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_map

from lightning_dct.pipeline.partition import Piece
from lightning_dct.pipeline.sequential import NetworkCall, context_of


class Border(NamedTuple):
    """The shape and dtype of an activation that crosses from one piece to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def trace_borders(
    pieces: Sequence[Piece],
    call: NetworkCall,
    device: torch.device,
    precision: Callable[[], AbstractContextManager[Any]],
) -> list[Border]:
    """Find what crosses the borders in a call of the network: one border fewer than pieces.

    The pieces run on fake tensors, which have shapes but no memory. So every rank finds all borders, whichever pieces
    it holds, and no state, random number or gradient changes. ``precision`` opens the context of forward (autocast).

    Raises:
        ValueError: A piece returns something other than one floating-point tensor to the next.
        RuntimeError: A piece cannot run on fake tensors.
    """
    borders = []
    eager = torch.compiler.set_stance("force_eager")  # pieces may be compiled
    with eager, FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), precision():
        value, context = tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, call)
        for piece in pieces[:-1]:
            modules = piece.modules
            state = {
                name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                for name, tensor in chain(modules.named_parameters(), modules.named_buffers())
            }
            try:
                value = functional_call(modules, state, (value,), context_of(modules, context))
            except Exception as error:
                raise RuntimeError(
                    f"Piece {piece.index} of the pipeline cannot be run on fake tensors, with which"
                    " `DCTPipelineStrategy` finds the shapes that cross between stages. Its forward must not read"
                    f" values of tensors (`.item()`, `.numpy()`). The error was: {error}"
                ) from error
            if not isinstance(value, Tensor) or not value.is_floating_point():
                raise ValueError(
                    f"Piece {piece.index} of the pipeline returns {_describe(value)}; what crosses a SplitPoint must"
                    " be one tensor of real numbers. Stack what the next piece needs into one tensor."
                )
            borders.append(Border(tuple(value.shape), value.dtype))
    return borders


def signature(value: Any) -> tuple[Any, ...]:
    """A key that is equal for inputs that lead to the same borders: structure, shapes and dtypes."""
    leaves, structure = tree_flatten(value)
    described = tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
    return (structure, described)


def _describe(value: Any) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
