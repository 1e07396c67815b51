"""A device, pretended on a CPU: counts how often its host waits for it, and its operations.

A tensor on it is a tensor of the CPU in a wrapper that says to be on ``meta``. A host waits where
it reads numbers, and where the size of a result depends on them.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("meta")
# Operations that read numbers, or whose results have sizes that depend on them.
WAITS = {
    *("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount"),
    *("_unique2", "unique_consecutive", "unique_dim"),
}
READS = {"_local_scalar_dense", "equal"}
# They start nothing on a device.
ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided"}


class OnDevice(Tensor):
    """A tensor on the pretended device."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnDevice":
        made: OnDevice = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.on_cpu = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, given: Any = (), settings: Any = None
    ) -> Any:
        return PretendedDevice.active.run(function, given, settings or {})

    def tolist(self) -> Any:
        PretendedDevice.active.wait()
        return self.on_cpu.tolist()


def cpu_of(tensor: Tensor) -> Tensor:
    """The tensor of the CPU in a wrapper; others are given as they are."""
    return tensor.on_cpu if isinstance(tensor, OnDevice) else tensor


class PretendedDevice(TorchDispatchMode):
    """Counts what a host does with the device."""

    active: "PretendedDevice"

    def __init__(self) -> None:
        super().__init__()
        self.waits = self.operations = 0
        self.waited: Counter[str] = Counter()  # by place in the package

    def wait(self) -> None:
        self.waits += 1
        frame = sys._getframe(1)
        while frame.f_back is not None and "lightning_dct" not in frame.f_code.co_filename:
            frame = frame.f_back
        self.waited[f"{frame.f_code.co_name}, line {frame.f_lineno}"] += 1

    def __torch_dispatch__(
        self, function: Any, types: Any, given: Any = (), settings: Any = None
    ) -> Any:
        return self.run(function, given, settings or {})

    def run(self, function: Any, given: Any, settings: dict[str, Any]) -> Any:
        """Do an operation on the CPU, and count it if it is the device's."""
        name = function._schema.name.removeprefix("aten::")
        is_from_device = any(isinstance(leaf, OnDevice) for leaf in tree_leaves((given, settings)))
        device = settings.get("device")
        target = is_from_device if device is None else torch.device(device) == DEVICE
        moved = {**settings, **({} if device is None else {"device": torch.device("cpu")})}
        inner = tree_map_only(OnDevice, lambda tensor: tensor.on_cpu, (given, moved))
        result = function(*inner[0], **inner[1])
        if not (is_from_device or target):
            return result
        self.operations += not function.is_view and name not in ALLOCATIONS
        mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in given[1]
        )
        is_read = is_from_device and not target
        is_copied_off = name == "copy_" and not isinstance(given[0], OnDevice)
        # CUDA's host waits for all work before a copy that may block.
        is_sent = target and not is_from_device and not settings.get("non_blocking")
        blocks = is_sent and name in ("_to_copy", "copy_")
        if name in WAITS or mask or is_read or is_copied_off or blocks:
            self.wait()
        if name in READS or is_read:
            return result
        if is_copied_off:
            return given[0]
        wrapped = tree_map_only(Tensor, OnDevice, result)
        if not is_from_device:
            return wrapped
        return return_and_correct_aliasing(function, given, settings, wrapped)


@contextmanager
def pretended_device() -> Iterator[PretendedDevice]:
    """Tensors that are made on ``meta`` are on the pretended device, and messages leave it."""
    tensor = torch.tensor
    all_to_all = dist.all_to_all_single

    def made(data: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
        on_cpu = tensor(data, dtype=dtype)
        return on_cpu.to(DEVICE) if device == DEVICE else on_cpu

    def sent(received: Tensor, data: Tensor, *given: Any, **settings: Any) -> Any:
        return all_to_all(cpu_of(received), cpu_of(data), *given, **settings)

    with (
        patch.object(torch, "tensor", made),
        patch.object(dist, "all_to_all_single", sent),
        PretendedDevice() as device,
    ):
        PretendedDevice.active = device
        yield device
