"""Which kernel there is if numba is installed and cannot be used."""

import os
import re
import subprocess
import tempfile
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import pytest

from distributed.harness import PYTHON
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


NO_FOLDER = RuntimeError("cannot cache function '_window': no locator available")
FOLDER_OF_ANOTHER_PROCESS = """
import tempfile
from lightning_dct import kernels
print(tempfile.gettempdir(), kernels._folder_of_user())
"""


def test_numba_that_finds_no_folder_for_its_cache_gets_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a container whose user may write neither to the package nor to the home folder.

    Oracle: another process, which takes the same one.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert load(monkeypatch, [NO_FOLDER]) is None
    (folder,) = tmp_path.iterdir()
    assert str(folder) == numba.config.CACHE_DIR
    assert folder.stat().st_mode & 0o077 == 0
    assert folder_of_another_process(tmp_path) == str(folder)


def test_a_folder_that_others_can_write_to_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Oracle: another folder, which is gone when its process has ended."""
    place = tmp_path / f"lightning_dct-numba-{os.getuid()}"
    place.mkdir()
    place.chmod(0o777)
    other = folder_of_another_process(tmp_path)
    assert other.startswith(str(tmp_path / "lightning_dct-numba-"))
    assert list(tmp_path.glob("lightning_dct*")) == [place]  # torch may have one of its own
    assert other != str(place)


def folder_of_another_process(folder: Path) -> str:
    environment = {**os.environ, "TMPDIR": str(folder)}
    asked = [PYTHON, "-c", FOLDER_OF_ANOTHER_PROCESS]
    there, found = subprocess.run(
        asked, env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    assert there == str(folder)
    return found


@pytest.mark.parametrize(
    "errors",
    [
        [ImportError("numba needs another numpy")],
        [RuntimeError("no locator"), RuntimeError("still none")],
    ],
)
def test_numba_that_cannot_be_loaded_is_not_used(
    monkeypatch: pytest.MonkeyPatch, errors: list[Exception]
) -> None:
    last = errors[-1]
    assert load(monkeypatch, errors) is last
    monkeypatch.setattr(kernels, "_numba_error", lambda: last)
    kernels.fastest_kernel.cache_clear()
    assert kernels.fastest_kernel("cpu") == "torch"
    assert str(last) in str(kernels.faster_kernel_missing("cpu"))
    kernels.fastest_kernel.cache_clear()


@pytest.mark.parametrize("kernel", ["torch", "numba"])
def test_the_torch_kernel_calls_no_loop_of_numba(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither to select and add, nor to code positions and values of both formats: `kernel=` holds
    everywhere.
    """
    called = set()
    for name, function in list(vars(numba_cpu).items()):
        if (
            isinstance(function, FunctionType)
            and function.__module__ == numba_cpu.__name__
            and name[0] != "_"
        ):
            counted = partial(
                lambda name, function, *args: called.add(name) or function(*args), name, function
            )
            monkeypatch.setattr(numba_cpu, name, counted)
    sizes = {"weight": 4000, "bias": 300}
    ranks = EmulatedRanks(sizes, exchange="two_phase", kernel=kernel, density=0.05)
    ranks.step(heavy_tailed(0, sizes=sizes))
    coded = {"write_payload", "read_payload", "decode_scaled"}
    assert called == (
        set() if kernel == "torch" else coded | {"select", "fit", "add_sums", "subtract"}
    )


@pytest.mark.parametrize(
    ("kernel", "device_type", "message"),
    [
        (
            "auto",
            "mps",
            "Exchanges work on CPUs and NVIDIA GPUs, not on mps. Use `accelerator='cpu'`.",
        ),
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
