"""Oracle: bytes and a checkpoint that an earlier version has written, and what came of them
there.
"""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from golden.golden import (
    ARCHIVE,
    BYTES,
    CHECKPOINT,
    CODES,
    DENSE,
    FORMATS,
    ROW_FORMATS,
    SEEN,
    coded_rows,
    entries,
    layout,
    payload,
    resume,
    rows,
)
from lightning_dct import kernels
from lightning_dct.reference import as_read
from lightning_dct.wire.payload import unpack_payload
from lightning_dct.wire.rows import decode_rows, row_scales_num_bytes

GOLDEN = {
    name: torch.tensor(list(bytes.fromhex(digits)))
    for name, digits in json.loads(BYTES.read_text()).items()
}


@pytest.fixture(params=kernels.available_kernels("cpu"))
def _kernel(request: Any) -> Iterator[None]:
    caches = kernels.cpu_kernel, kernels.fastest_kernel
    with mock.patch.object(kernels, "available_kernels", return_value=[request.param]):
        for one in caches:
            one.cache_clear()
        yield
    for one in caches:
        one.cache_clear()


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("value_format", FORMATS)
def test_payloads(value_format: str, code: str) -> None:
    """They are written and read as then; what is read is what the reference reads."""
    golden, (positions, values), first = (
        GOLDEN[f"{value_format}, {code}"],
        entries(code),
        CODES[code][0],
    )
    assert payload(value_format, code).tolist() == golden.tolist()
    read = unpack_payload(layout(value_format, code), golden.to(torch.uint8))
    assert read.positions.tolist() == positions.tolist()
    assert read.dense.tolist() == DENSE.tolist()
    expected = [as_read(part, value_format) for part in (values[:first], values[first:])]
    assert torch.equal(read.values, torch.cat(expected))
    assert layout(value_format, code).position_code.is_bitmap == (code == "bitmap")


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("value_format", ROW_FORMATS)
def test_rows(value_format: str, noise: bool) -> None:
    golden, (values, row_of) = GOLDEN[f"{value_format} rows, {noise=}"], rows()
    assert coded_rows(value_format, noise).tolist() == golden.tolist()
    scales, data = golden.to(torch.uint8).tensor_split([row_scales_num_bytes(value_format, 5)])
    sent, where = (values[4:], row_of[4:]) if noise else (values, None)
    read = decode_rows(data, sent.numel(), where, scales, value_format)
    if value_format == "fp32":
        assert torch.equal(read, sent)
    # Steps of a row with an infinite value do not matter.
    finite = read.isfinite()
    spread = values.view(5, 6).abs().amax(1)[row_of[-sent.numel() :]]
    steps = {"fp32": 1e-9, "bf16": 2.0**-8, "int8": 1.1 / 127, "int4": 1.1 / 7}[value_format]
    assert finite[row_of[-sent.numel() :] != 3].all()
    assert ((read - sent)[finite].abs() <= steps * spread[finite]).all()


def test_checkpoint(ranks: Any, tmp_path: Path) -> None:
    """Both ranks begin with the same bits as then, and go on as then, but for the rounding of other
    processors.
    """
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path)
    seen = torch.load(tmp_path / SEEN, weights_only=True)
    for expected, found in zip(seen, ranks(2).run(resume, tmp_path / CHECKPOINT), strict=True):
        for then, now, accuracy in zip(expected, found, ({"rtol": 0, "atol": 0}, {}), strict=True):
            assert then.keys() == now.keys()
            for name, tensor in then.items():
                torch.testing.assert_close(now[name], tensor, **accuracy)
    starts = [start for start, _ in seen]
    assert not torch.equal(*(start["own top.weight"] for start in starts))
    assert torch.equal(*(start["shared top.weight"] for start in starts))
