"""The GPU kernels where there is no GPU: they compile for one, and triton's interpreter runs them.

The interpreter is on from the start in a process of its own. It takes what the compiler refuses, so both are needed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="those tests run the kernels on the GPU themselves")
def test_the_kernels_keep_their_contracts_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="there is no triton for this platform")
    tests = Path(__file__).with_name("test_buffered.py")
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


@pytest.mark.parametrize("gradient", ["*fp32", "*bf16"])
def test_the_kernels_compile_for_a_gpu(gradient: str) -> None:
    pytest.importorskip("triton", reason="there is no triton for this platform")
    from triton import compile as compile_for
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_dct.kernels import triton_cuda

    numbers = {"gradient": gradient, **dict.fromkeys(("residual", "numbers", "values"), "*fp32")}
    flags = {"BLOCK": "constexpr", "unmade": "*i32"}
    for kernel, broken in ((triton_cuda._accumulate, "*i32"), (triton_cuda._fill, "*i1")):
        types = {**numbers, **flags, "broken": broken}
        source = ASTSource(
            fn=kernel,
            signature={name: types.get(name, "*i64") for name in kernel.arg_names},
            constexprs={"BLOCK": triton_cuda.BLOCK},
        )
        compiled = compile_for(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
        assert compiled.asm["cubin"]
        # A fused product and sum would round once where the other kernels round twice.
        assert "fma" not in compiled.asm["ptx"]
