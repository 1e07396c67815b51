"""The hot path over memory: add, compare and compact on the way out, sum on the way in. Two contracts, several kernels.

========  ===========  ==================================================================
kernel    needs        what it is
========  ===========  ==================================================================
torch                  cache-sized chunks on the CPU, whole tensors on a GPU
numba     numba        one pass over memory on the CPU (``pip install '.[fast]'`` in a clone)
triton    triton       two passes on a CUDA GPU; see :mod:`~lightning_dct.kernels.buffered`
========  ===========  ==================================================================

All give the same entries, residuals and sums to the last bit, so it does not matter when ranks use different ones.
What arrives on a GPU is summed by torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, get_args

from torch import Tensor

from lightning_dct.kernels.selection import Kernel, Selection

KernelName = Literal["auto", "torch", "numba", "triton"]
KERNELS: tuple[str, ...] = get_args(KernelName)
_DEVICES = {"numba": "cpu", "triton": "cuda"}
_REMEDIES = {"numba": "pip install '.[fast]' in a clone of lightning_dct", "triton": "pip install triton"}

__all__ = [
    "KERNELS",
    "Kernel",
    "KernelName",
    "Selection",
    "add_rows",
    "available_kernels",
    "check_kernel",
    "fastest_kernel",
    "select",
    "select_adjacent",
    "sum_entries",
]


def select(
    gradient: Tensor,
    residual: Tensor,
    segments: Sequence[tuple[int, int]],
    thresholds: Sequence[float],
    gradient_scale: float = 1.0,
    kernel: str = "auto",
) -> Selection:
    """Add the gradient to the residual and pick the entries at or above the threshold.

    See :mod:`lightning_dct.kernels.selection` for the contract.

    Args:
        gradient: Shape ``[n]``, any floating dtype: the flattened bucket. Not changed.
        residual: Shape ``[n]``, fp32 or fp64, finite. Changed in place.
        segments: Ascending ranges ``(start, stop)`` of the bucket, one for each compressed tensor.
        thresholds: One positive threshold for each segment.
        gradient_scale: Factor on the gradient: one over the loss scale of mixed-precision training.
        kernel: ``"auto"`` takes the fastest that is installed and fits the device; a name forces one.

    Raises:
        ValueError: The kernel is not installed or does not work on this device.
    """
    chosen: Kernel = _implementation(kernel, gradient.device.type).select
    return chosen(gradient, residual, segments, thresholds, gradient_scale)


def select_adjacent(
    gradient: Tensor,
    residual: Tensor,
    segments: Sequence[tuple[int, int]],
    thresholds: Sequence[float],
    gradient_scale: float,
) -> Selection:
    """:func:`select` for many small segments that cover the tensor: without numba all of them at once.

    Arguments as for :func:`select`, but ``gradient_scale`` is 1 or -1.
    """
    has_numba = fastest_kernel(gradient.device.type) == "numba"
    chosen: Kernel = select if has_numba else import_module("lightning_dct.kernels.reference").select_adjacent
    return chosen(gradient, residual, segments, thresholds, gradient_scale)


def sum_entries(
    total: Tensor,
    segments: Sequence[tuple[int, int]],
    entries: Sequence[tuple[Tensor, Tensor]],
    factor: float,
    kernel: str = "auto",
) -> None:
    """Overwrite segments with ``factor`` times the sum of sparse vectors, added one after the other.

    Each product and each sum is rounded once, so that the result is the same whoever does it.

    Args:
        total: Shape ``[n]``, fp32 or fp64. Overwritten in the segments, untouched elsewhere.
        segments: Ascending ranges ``(start, stop)``.
        entries: Positions (int64, ascending and distinct, within the segments) and values of each vector, fp32 or
            in the total's dtype.
        factor: Weight of all of them.
        kernel: As for :func:`select`.

    Raises:
        ValueError: The kernel is not installed or does not work on this device.
    """
    _implementation(kernel, total.device.type).sum_entries(total, segments, entries, factor)


def add_rows(total: Tensor, places: Tensor, rows: Tensor) -> None:
    """Add rows to rows of a sum, one after the other: ``total.index_add_(0, places, rows)``, faster with numba.

    Args:
        total: Shape ``[n, dim]``, contiguous. Changed in place.
        places: Shape ``[k]``, int64 below ``n``; a row may come more than once.
        rows: Shape ``[k, dim]``, in the same dtype.
    """
    if fastest_kernel(total.device.type) == "numba":
        import_module("lightning_dct.kernels.numba_cpu").add_rows(total, places, rows)
    else:
        total.index_add_(0, places, rows)


def available_kernels(device_type: str) -> list[str]:
    """The kernels that are installed and work on a device, the slowest first."""
    return [name for name in KERNELS[1:] if _DEVICES.get(name, device_type) == device_type and _is_installed(name)]


@cache
def fastest_kernel(device_type: str) -> str:
    """What ``"auto"`` takes on a device."""
    return available_kernels(device_type)[-1]


def faster_kernel_missing(device_type: str) -> str | None:
    """A sentence where a package that is not installed would make compressing faster on a device, else None."""
    if device_type != "cpu" or _is_installed("numba"):
        return None
    return (
        "numba is not installed, and without it compressing takes several times as long on a CPU: `pip install numba`."
    )


def check_kernel(name: str, device_type: str) -> None:
    """Refuse a kernel that cannot run.

    Raises:
        ValueError: It is not installed or does not work on this device.
    """
    if name in ("auto", "torch"):
        return
    if _DEVICES[name] != device_type:
        raise ValueError(f"`kernel={name!r}` works on {_DEVICES[name]}, not on {device_type}. Use `kernel='auto'`.")
    if not _is_installed(name):
        raise ValueError(f"`kernel={name!r}` needs the package {name}: `{_REMEDIES[name]}`, or use `kernel='auto'`.")


def _implementation(kernel: str, device_type: str) -> Any:
    name = fastest_kernel(device_type) if kernel == "auto" else kernel
    check_kernel(name, device_type)
    # What triton does on a GPU has another contract, that of `buffered`; what is left for these two is torch's.
    return import_module(f"lightning_dct.kernels.{'numba_cpu' if name == 'numba' else 'reference'}")


@cache
def _is_installed(package: str) -> bool:
    return find_spec(package) is not None
