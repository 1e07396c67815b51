"""The GPU kernel where there is no GPU: triton's interpreter runs it, in a process that has it on from the start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_select.py runs the kernel on the GPU itself")
def test_the_kernel_keeps_the_contract_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="there is no triton for this platform")
    tests = Path(__file__).with_name("test_select.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rp", "-k", "triton", str(tests)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[100%]" in done.stdout
    assert "[triton" in done.stdout
