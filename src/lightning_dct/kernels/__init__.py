"""The kernels: operations on whole tensors before and after an exchange.

========  ===========  ==================================================================
kernel    needs        description
========  ===========  ==================================================================
torch                  torch and numpy, in cache-sized chunks
numba     numba        compiled loops at the speed of memory (``pip install '.[fast]'``)
triton    torch, CUDA  on a GPU, the only one there
========  ===========  ==================================================================

:mod:`~lightning_dct.kernels.plain` describes each function on a CPU. All kernels give the same
bits, so ranks may mix them. :mod:`~lightning_dct.kernels.numba_rows` codes rows of activations as
:mod:`lightning_dct.wire.rows` does, and :mod:`~lightning_dct.kernels.numba_ids` finds rows of
tables.
"""

import atexit
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_dct.kernels.bits import nonzero_indices, unpack_bits

KernelName = Literal["auto", "torch", "numba"]
_load = cache(import_module)


@cache
def cpu_kernel(kernel: str = "auto") -> Any:
    """The module of a kernel; with ``"auto"`` the fastest that is installed.

    :func:`check_kernel` describes errors.
    """
    name = fastest_kernel("cpu") if kernel == "auto" else kernel
    check_kernel(name, "cpu")
    return import_module(f"lightning_dct.kernels.{'numba_cpu' if name == 'numba' else 'plain'}")


def compiled(device_type: str, kernel: str = "auto", loops: str = "numba_cpu") -> Any:
    """The loops of numba; None on a GPU, without numba, and with another kernel."""
    is_used = kernel != "torch" and fastest_kernel(device_type) == "numba"
    return _load(f"lightning_dct.kernels.{loops}") if is_used else None


@lru_cache(maxsize=64)
def weights_by_senders(ranks: int, factor: float, gain: float | None, dtype: torch.dtype) -> Tensor:
    """The weight of a sum by the number of ranks that have sent an entry: shape ``[ranks + 1]``,
    read-only.

    That is ``factor`` times the gain, at most ``ranks / senders``; None is ``sqrt(ranks /
    senders)``.
    """
    senders = torch.arange(ranks + 1, dtype=torch.float64).clamp_(min=1)
    fewer = ranks / senders
    return (factor * (fewer.sqrt() if gain is None else fewer.clamp(max=gain))).to(dtype)


def add_rows(total: Tensor, indices: Tensor, rows: Tensor) -> None:
    """``total.index_add_(0, indices, rows)``, one row after the other; faster with numba.

    ``total`` has shape ``[n, dim]`` and is contiguous, ``indices`` shape ``[k]``, int64, with
    repetitions, and ``rows`` shape ``[k, dim]`` or ``[i, k / i, dim]`` in the same dtype.
    """
    if (loops := compiled(total.device.type)) is not None:
        loops.add_rows(total, indices, rows)
    else:
        add_in_order(total, indices, rows.reshape(-1, rows.shape[-1]))


def add_in_order(total: Tensor, indices: Tensor, rows: Tensor) -> None:
    """``total.index_add_(0, indices, rows)``, with the same bits in every run: on a GPU that has no
    fixed order.
    """
    if total.device.type == "cpu":
        total.index_add_(0, indices, rows)
    else:
        total.index_put_((indices,), rows, accumulate=True)


def positions_of(flags: Tensor, count: int) -> Tensor:
    """The numbers of the ``count`` flags that are set: shape ``[count]``, int64, ascending."""
    if (loops := compiled(flags.device.type)) is not None:
        return loops.positions_of(flags, count)
    return nonzero_indices(unpack_bits(flags, 8 * flags.numel()))


def available_kernels(device_type: str) -> list[str]:
    """The installed kernels for a device, the slowest first."""
    if device_type == "cuda":
        return ["triton"]
    return ["torch", "numba"] if device_type == "cpu" and _numba_error() is None else ["torch"]


@cache
def fastest_kernel(device_type: str) -> str:
    """The kernel that ``"auto"`` takes on a device."""
    return available_kernels(device_type)[-1]


def faster_kernel_missing(device_type: str) -> str | None:
    """A message if a package that cannot be used would speed up compression on a device, else
    None.
    """
    if device_type != "cpu" or (error := _numba_error()) is None:
        return None
    return (
        f"numba cannot be used ({error}), and without it compressing takes several times as long on"
        " a CPU: `pip install numba`."
    )


def check_kernel(name: str, device_type: str) -> None:
    """Refuse a device, or a kernel that is not installed or does not work there (ValueError)."""
    if device_type not in ("cpu", "cuda", "meta"):
        raise ValueError(
            f"Exchanges work on CPUs and NVIDIA GPUs, not on {device_type}. Use"
            " `accelerator='cpu'`."
        )
    if name != "auto" and device_type != "cpu":
        raise ValueError(
            f"`kernel={name!r}` works on cpu, not on {device_type}. Use `kernel='auto'`."
        )
    if device_type == "cuda" and find_spec("triton") is None:
        raise ValueError(
            "Exchanges on a GPU need Triton, which torch for CUDA brings on Linux: `pip install"
            " triton`."
        )
    if name == "numba" and (error := _numba_error()) is not None:
        raise ValueError(
            f"`kernel='numba'` needs the package numba ({error}): `pip install '.[fast]'` in a"
            " clone of lightning_dct. Or use `kernel='auto'`."
        )


def _folder_of_user() -> str:
    """A folder for what numba compiles, which all processes of this user share: compiling takes
    most of a minute.
    """
    folder = os.path.join(tempfile.gettempdir(), f"lightning_dct-numba-{os.getuid()}")
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return folder
    # Another user has made it, and what lies there would be run. One of this process's own goes
    # when it ends.
    own = tempfile.mkdtemp(prefix="lightning_dct-numba-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return own


@cache
def _numba_error() -> Exception | None:
    """Why the loops of numba cannot be loaded; None if they can."""
    try:
        try:
            import_module("lightning_dct.kernels.numba_cpu")
        except RuntimeError:
            # Neither the package's folder nor the user's can be written to, as in some containers.
            import_module("numba").config.CACHE_DIR = _folder_of_user()
            import_module("lightning_dct.kernels.numba_cpu")
    except Exception as error:  # an ImportError, or what a numba for another numpy raises
        return error
    return None
