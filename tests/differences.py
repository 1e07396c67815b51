"""Where nested results of two runs differ: dictionaries, lists, tensors and numbers, to the last
bit.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def differences(one: Any, other: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Where they differ, and by how much: infinitely where they are not of one kind, or one alone
    is NaN.
    """
    if (
        isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and (one.shape, one.dtype) == (other.shape, other.dtype)
    ):
        if not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
            worst = float((one.double() - other.double()).abs().max())
            yield name, worst if worst == worst else float("inf")
    elif isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from differences(one[key], other[key], f"{name}.{key}")
    elif (
        isinstance(one, (list, tuple))
        and isinstance(other, (list, tuple))
        and len(one) == len(other)
    ):
        for index, parts in enumerate(zip(one, other, strict=True)):
            yield from differences(*parts, f"{name}[{index}]")
    elif isinstance(one, float) and isinstance(other, float):
        if one != other:
            yield name, abs(one - other)
    elif (
        type(one) is not type(other) or isinstance(one, (Tensor, dict, list, tuple)) or one != other
    ):
        yield name, float("inf")


def assert_same(one: Any, other: Any) -> None:
    assert list(differences(one, other)) == []
