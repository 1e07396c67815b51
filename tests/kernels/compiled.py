"""Compiles every kernel for GPUs to machine code, without a GPU, and prints what fails: ``python
compiled.py 80 90``.

All variants for the first kind of GPU, and one of each kernel for the others.
"""

import sys
from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_dct.kernels import triton_add, triton_pack

FORMATS = ("1bit", "2bit", "fp32", "bf16")
# Arguments that are not pointers to int64.
WORDS = ("flags", "signs", "large", "payload", "payloads", "opened", "own_payload", "own_opened")
DOUBLES = ("taus", "limits", "scale", "sums", "aims", "moved", "means", "dropped")
INTEGERS = ("block_tensor", "block_part", "broken", "fits", "wrong")
NUMBERS = (
    "count",
    "stride",
    "blocks",
    "words",
    "num_parts",
    "header",
    "tag",
    "mine",
    "first",
    "end",
    "chunk",
    "origin",
)
TYPES = {
    **dict.fromkeys(WORDS, "*u32"),
    **dict.fromkeys(DOUBLES, "*fp64"),
    **dict.fromkeys(INTEGERS, "*i32"),
    **dict.fromkeys(NUMBERS, "i32"),
    **dict.fromkeys(("samples", "weights", "factors"), "*fp32"),
}


def variants() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Kernels, and what each is compiled with."""
    for scaled in (True, False):
        kinds = {
            "DTYPE": tl.float16 if scaled else tl.float32,
            "BASE": tl.float32,
            "SCALED": scaled,
        }
        for number in range(3):
            yield triton_pack.mark, {**kinds, "PASS": number}
        yield triton_pack.sample, {**kinds, "STEPS": 12, "LANES": 256, "SAMPLE": 4096}
        yield triton_pack.enlarge, kinds
        for name in FORMATS:
            yield triton_pack.write, {**kinds, "FORMAT": name, "GROUPS": 16, "PLANES": 6}
            yield triton_pack.keep_rest, {**kinds, "FORMAT": name, "RANKS_KEEP_UNSENT": scaled}
    yield (
        triton_pack.limit,
        {
            "BASE": tl.float32,
            "INTEGER": tl.int32,
            "BITS": 31,
            "SAMPLE": 4096,
            "GUARD": True,
            "FACTOR": 1.25,
            "RESELECT": 2,
            "TINY": 1e-38,
        },
    )
    yield triton_pack.average, {"ROUNDS": 4, "SCALES": True}
    yield triton_pack.two_levels, {"ROUNDS": 4, "LARGEST": 1e38}
    yield triton_pack.write_headers, {}
    yield triton_add.count_flags, {"CODE": 8192}
    yield triton_add.decode, {"CODE": 8192, "PLANES": 6}
    yield triton_add.count_entries, {}
    yield triton_add.judge, {"ROUNDS": 2, "SCALES": True}
    for name, own, owns in (
        ("1bit", None, True),
        ("2bit", "1bit", True),
        ("fp32", None, False),
        ("bf16", None, True),
    ):
        yield triton_add.open_words, {"FORMAT": name}
        kinds = {"FORMAT": name, "OWN_FORMAT": own, "OWNS": owns, "GAINS": owns}
        yield triton_add.add, {"SENDERS": 2, "BASE": tl.float32, **kinds}


def main() -> int:
    failed = 0
    for place, arch in enumerate(map(int, sys.argv[1:])):
        every = list(variants())
        for kernel, given in (
            every if place == 0 else {kernel: (kernel, given) for kernel, given in every}.values()
        ):
            types = {
                name: "constexpr" if name in given else TYPES.get(name, "*i64")
                for name in kernel.arg_names
            }
            constants = {(kernel.arg_names.index(name),): value for name, value in given.items()}
            source = ASTSource(fn=kernel, signature=types, constexprs=constants)
            try:
                triton.compile(
                    source, target=GPUTarget("cuda", arch, 32), options={"enable_fp_fusion": False}
                )
            except Exception as error:
                failed += 1
                print(f"sm_{arch} {kernel.__name__} {given}: {error!r}"[:500])
    return failed


if __name__ == "__main__":
    sys.exit(main())
