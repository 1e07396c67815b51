"""The GPU's way on a CPU: Triton's interpreter runs the kernels, which takes a second an exchange.

Triton looks for the choice when it is imported, so ``conftest.py`` makes it. With ``TESTS_ON=cuda``
(``gpu_check.py``) the kernels run on a card instead.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from one_card import DEVICE

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime import interpreter

from lightning_dct.compress import awaited, on_gpu

WAYS = ("torch", "numba", "triton")
CPU = torch.device("cpu")

if DEVICE.type == "cpu":
    # The interpreter prepares the language anew for every call of a function, which takes most of
    # its time. Once is enough for each module, and those that see `tl` alone are prepared with
    # their kernel.
    _prepared: set[int] = set()
    _one_at_a_time = Lock()
    _launch = on_gpu._launch

    def _call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if (module := id(self.fn.__globals__)) not in _prepared:
            _prepared.add(module)
            if any(
                value is tl.core
                for value in self.fn.__globals__.values()
                if inspect.ismodule(value)
            ):
                interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **keywords)

    def _launch_alone(*arguments: Any, **keywords: Any) -> None:
        # The place in the grid is one for the whole process, in which emulated ranks are threads.
        with _one_at_a_time:
            _launch(*arguments, **keywords)

    # Checks that nobody reads, the types of tuples, which are for the compiler, and a table that is
    # made at every call.
    interpreter.interpreter_builder.options = replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    tl.core._type_for_tuple_values = lambda *_: None  # type: ignore[attr-defined]
    _dtypes: dict[str, Any] = {}
    _dtype_of = interpreter._get_np_dtype
    interpreter._get_np_dtype = lambda kind: (
        _dtypes.get(kind.scalar.name) or _dtypes.setdefault(kind.scalar.name, _dtype_of(kind))
    )
    # One program looks at all samples.
    on_gpu.LANES = on_gpu.LIMIT_SAMPLE
    # Even small plans are read in several pieces.
    on_gpu.CODED = 512
    on_gpu.OPENED_AT_ONCE = 2
    on_gpu.DECODED_AT_ONCE = 4
    interpreter.InterpretedFunction.__call__ = _call  # type: ignore[method-assign]
    on_gpu._launch = _launch_alone


@contextmanager
def way_of(way: str) -> Iterator[str]:
    """Tensors go one of the ways, a context at a time; gives the kernel's name for a
    :class:`ErrorFeedback`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(awaited, "WITHOUT_WAITING", {DEVICE.type} if way == "triton" else set())
        yield "auto" if way == "triton" else way


def device_of(way: str) -> torch.device:
    return DEVICE if way == "triton" else CPU


def on(device: torch.device, tensors: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), tensors)


def bits(numbers: Tensor) -> Tensor:
    return numbers.view(
        {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[numbers.itemsize]
    )
