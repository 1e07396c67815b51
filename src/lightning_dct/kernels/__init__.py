"""The kernels that read and write whole buckets: select before an exchange, sum after it.

========  ===========  ==================================================================
kernel    needs        description
========  ===========  ==================================================================
torch                  cache-sized chunks on the CPU, whole tensors on a GPU
numba     numba        one pass over memory on the CPU (``pip install '.[fast]'`` in a clone)
========  ===========  ==================================================================

Both give the same entries, residuals and sums to the last bit, so ranks may use different ones. On a GPU
:mod:`~lightning_dct.kernels.buffered` selects gradients and updates. :mod:`~lightning_dct.kernels.numba_rows` codes
rows of activations as :mod:`lightning_dct.wire.rows` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

from torch import Tensor

from lightning_dct.kernels.reference import Selection

KernelName = Literal["auto", "torch", "numba", "triton"]
# What "triton" has become; `DCTConfig` says so.
ALIASES = {"triton": "torch"}


def select(
    gradient: Tensor,
    residual: Tensor,
    segments: Sequence[tuple[int, int]],
    thresholds: Sequence[float],
    gradient_scale: float = 1.0,
    kernel: str = "auto",
) -> Selection:
    """Add the gradient to the residual and select the entries whose magnitude reaches their threshold.

    :mod:`lightning_dct.kernels.reference` describes arguments and result. ``kernel="auto"`` takes the fastest installed
    kernel for the device. :func:`check_kernel` describes errors.
    """
    module = _implementation(kernel, gradient.device.type)
    selection: Selection = module.select(gradient, residual, segments, thresholds, gradient_scale)
    return selection


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
    fp64, and does not change outside the ``segments`` (ascending ranges). A vector is its positions (int64, ascending,
    distinct, in the segments) and its values (fp32 or the total's dtype). ``by_senders`` first multiplies each value by
    the square root of the number of vectors over the number of those that are not zero there. ``kernel`` and errors are
    as for :func:`select`.
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


@cache
def rows_kernel(device_type: str) -> Any:
    """:mod:`~lightning_dct.kernels.numba_rows`, or None without numba."""
    return import_module("lightning_dct.kernels.numba_rows") if fastest_kernel(device_type) == "numba" else None


def available_kernels(device_type: str) -> list[str]:
    """The installed kernels for a device, the slowest first."""
    return ["torch", "numba"] if device_type == "cpu" and _is_installed("numba") else ["torch"]


@cache
def fastest_kernel(device_type: str) -> str:
    """The kernel that ``"auto"`` takes on a device."""
    return available_kernels(device_type)[-1]


def faster_kernel_missing(device_type: str) -> str | None:
    """A message if a package that is not installed would speed up compression on a device, else None."""
    if device_type != "cpu" or _is_installed("numba"):
        return None
    return (
        "numba is not installed, and without it compressing takes several times as long on a CPU: `pip install numba`."
    )


def check_kernel(name: str, device_type: str) -> None:
    """Refuse a kernel that is not installed or does not work on this device (ValueError)."""
    if name != "numba":
        return
    if device_type != "cpu":
        raise ValueError(f"`kernel='numba'` works on cpu, not on {device_type}. Use `kernel='auto'`.")
    if not _is_installed("numba"):
        raise ValueError(
            "`kernel='numba'` needs the package numba: `pip install '.[fast]' in a clone of lightning_dct`, or use"
            " `kernel='auto'`."
        )


def _implementation(kernel: str, device_type: str) -> Any:
    name = fastest_kernel(device_type) if kernel == "auto" else kernel
    check_kernel(name, device_type)
    return import_module(f"lightning_dct.kernels.{'numba_cpu' if name == 'numba' else 'reference'}")


@cache
def _is_installed(package: str) -> bool:
    return find_spec(package) is not None
