"""Which kernel there is if numba is installed and cannot be used."""

import re
from functools import partial
from importlib import import_module
from types import FunctionType
from typing import Any

import numba
import pytest

from emulated_ranks import EmulatedRanks, heavy_tailed
from lightning_dct import kernels
from lightning_dct.kernels import numba_cpu


def load(monkeypatch: pytest.MonkeyPatch, errors: list[Exception]) -> Exception | None:
    """What is wrong with numba if its kernel's imports raise these errors, one after the other."""

    def fail_first(name: str) -> Any:
        if name.endswith("numba_cpu") and errors:
            raise errors.pop(0)
        return import_module(name)

    monkeypatch.setattr(kernels, "import_module", fail_first)
    return kernels._numba_error.__wrapped__()


@pytest.fixture(autouse=True)
def _cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", numba.config.CACHE_DIR)


def test_numba_that_finds_no_folder_for_its_cache_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user may write neither to the package nor to the home folder."""
    assert load(monkeypatch, [RuntimeError("cannot cache function '_window': no locator available")]) is None
    assert "lightning_dct-numba-" in numba.config.CACHE_DIR


@pytest.mark.parametrize(
    "errors", [[ImportError("numba needs another numpy")], [RuntimeError("no locator"), RuntimeError("still none")]]
)
def test_numba_that_cannot_be_loaded_is_not_used(monkeypatch: pytest.MonkeyPatch, errors: list[Exception]) -> None:
    last = errors[-1]
    assert load(monkeypatch, errors) is last
    monkeypatch.setattr(kernels, "_numba_error", lambda: last)
    kernels.fastest_kernel.cache_clear()
    assert kernels.fastest_kernel("cpu") == "torch"
    assert str(last) in str(kernels.faster_kernel_missing("cpu"))
    kernels.fastest_kernel.cache_clear()


@pytest.mark.parametrize("kernel", ["torch", "numba"])
def test_the_torch_kernel_calls_no_loop_of_numba(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to select and add, nor to code positions and values of both formats: `kernel=` holds everywhere."""
    called = set()
    for name, function in list(vars(numba_cpu).items()):
        if isinstance(function, FunctionType) and function.__module__ == numba_cpu.__name__ and name[0] != "_":
            counted = partial(lambda name, function, *args: called.add(name) or function(*args), name, function)
            monkeypatch.setattr(numba_cpu, name, counted)
    sizes = {"weight": 4000, "bias": 300}
    ranks = EmulatedRanks(sizes, exchange="two_phase", kernel=kernel, density=0.05)
    ranks.step(heavy_tailed(0, sizes=sizes))
    coded = {"encode_scaled", "decode_scaled", "encode_elias_fano", "decode_elias_fano"}
    assert called == (set() if kernel == "torch" else coded | {"select", "fit", "add_sums", "subtract", "count_flags"})


@pytest.mark.parametrize(
    ("kernel", "device_type", "message"),
    [
        ("auto", "mps", "Exchanges work on CPUs and NVIDIA GPUs, not on mps. Use `accelerator='cpu'`."),
        ("auto", "xpu", "not on xpu"),
        ("torch", "cuda", "`kernel='torch'` works on cpu, not on cuda. Use `kernel='auto'`."),
        ("auto", "cuda", "Exchanges on a GPU need Triton"),
    ],
)
def test_devices_and_kernels_that_do_not_work_are_named(
    kernel: str, device_type: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape(message)):
        kernels.check_kernel(kernel, device_type)
