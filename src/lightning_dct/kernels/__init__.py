"""The hot path over memory: add, compare and compact on the way out, sum on the way in. Two contracts, several kernels.

========  ===========  ==================================================================
kernel    needs        what it is
========  ===========  ==================================================================
torch                  cache-sized chunks on the CPU, whole tensors on a GPU
numba     numba        one pass over memory on the CPU (``pip install '.[fast]'`` in a clone)
triton    triton       two passes on a CUDA GPU; see :mod:`~lightning_dct.kernels.buffered`
========  ===========  ==================================================================

All give the same entries, residuals and sums to the last bit, so ranks may use different ones. On a GPU, torch does the
sums. :mod:`~lightning_dct.kernels.numba_rows` codes rows of activations as :mod:`lightning_dct.wire.rows` does in
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, get_args

from torch import Tensor

from lightning_dct.kernels.reference import Kernel, Selection

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
    "buffer_kernel",
    "check_kernel",
    "fastest_kernel",
    "rows_kernel",
    "select",
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

    :mod:`lightning_dct.kernels.reference` describes arguments and result. ``kernel="auto"`` takes the fastest kernel
    that is installed and fits the device; a name forces one.

    Raises:
        ValueError: The kernel is not installed or does not work on this device.
    """
    chosen: Kernel = _implementation(kernel, gradient.device.type).select
    return chosen(gradient, residual, segments, thresholds, gradient_scale)


def sum_entries(
    total: Tensor,
    segments: Sequence[tuple[int, int]],
    entries: Sequence[tuple[Tensor, Tensor]],
    factor: float,
    kernel: str = "auto",
    by_senders: bool = False,
) -> None:
    """Overwrite segments with ``factor`` times the sum of sparse vectors, added one after the other.

    Each product and each sum is rounded once, so all kernels give the same result. ``total`` has shape ``[n]``, fp32 or
    fp64, and keeps what lies outside the ``segments`` (ascending ranges). A vector is its positions (int64, ascending,
    distinct, within the segments) and its values (fp32 or the total's dtype). With ``by_senders`` a value is first
    multiplied by the square root of the number of vectors over the number of those that are not zero there. ``kernel``
    and errors are as for :func:`select`.
    """
    _implementation(kernel, total.device.type).sum_entries(total, segments, entries, factor, by_senders)


def add_rows(total: Tensor, indices: Tensor, rows: Tensor) -> None:
    """``total.index_add_(0, indices, rows)``, one row after the other; faster with numba.

    ``total`` has shape ``[n, dim]`` and is contiguous, ``indices`` shape ``[k]``, int64, with repetitions, and ``rows``
    shape ``[k, dim]`` in the same dtype.
    """
    if fastest_kernel(total.device.type) == "numba":
        import_module("lightning_dct.kernels.numba_cpu").add_rows(total, indices, rows)
    else:
        total.index_add_(0, indices, rows)


def buffer_kernel(kernel: str, device_type: str) -> Any:
    """What selects into a buffer, by the contract of :mod:`~lightning_dct.kernels.buffered`: triton, or else torch."""
    name = _name(kernel, device_type)
    module = "triton_cuda" if name == "triton" else "buffered"
    return import_module(f"lightning_dct.kernels.{module}").select_into_buffer


@cache
def rows_kernel(device_type: str) -> Any:
    """What codes rows of equal length: :mod:`~lightning_dct.kernels.numba_rows`, or None where only torch does."""
    return import_module("lightning_dct.kernels.numba_rows") if fastest_kernel(device_type) == "numba" else None


def available_kernels(device_type: str) -> list[str]:
    """The kernels that are installed and work on a device, the slowest first."""
    return [name for name in KERNELS[1:] if _DEVICES.get(name, device_type) == device_type and _is_installed(name)]


@cache
def fastest_kernel(device_type: str) -> str:
    """The kernel that ``"auto"`` takes on a device."""
    return available_kernels(device_type)[-1]


def faster_kernel_missing(device_type: str) -> str | None:
    """A sentence if a package that is not installed would speed up compression on a device, else None."""
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


def _name(kernel: str, device_type: str) -> str:
    return fastest_kernel(device_type) if kernel == "auto" else kernel


def _implementation(kernel: str, device_type: str) -> Any:
    name = _name(kernel, device_type)
    check_kernel(name, device_type)
    # On a GPU triton serves the contract of `buffered`; torch serves these two.
    return import_module(f"lightning_dct.kernels.{'numba_cpu' if name == 'numba' else 'reference'}")


@cache
def _is_installed(package: str) -> bool:
    return find_spec(package) is not None
