"""Calls all of numba's kernels, so that one process compiles them, or reads them from the cache,
for all tests.
"""

import numpy as np
import torch

from lightning_dct.activations.codec import ActivationLayout, decode_forward, encode_forward
from lightning_dct.embedding.bags import distinct
from lightning_dct.embedding.cache import RowCache
from lightning_dct.embedding.owners import initial_rows
from lightning_dct.kernels import add_rows, cpu_kernel, positions_of
from lightning_dct.kernels.bits import flags_num_bytes
from lightning_dct.kernels.plain import Sent
from lightning_dct.wire.positions import PositionCode
from lightning_dct.wire.values import SCALED_FORMATS, decode_values, encode_values


def compile_all() -> None:
    """With the dtypes that there are."""
    kernel = cpu_kernel("numba")
    for dtype in (torch.float32, torch.float64):
        inputs = [torch.ones(64, dtype=dtype)]
        references = [torch.zeros(64, dtype=dtype)]
        flags = torch.zeros(flags_num_bytes(64), dtype=torch.uint8)
        for scale in (None, 1.0):
            values, counts = kernel.select(inputs, references, [0], [0.5], scale, flags)
        kernel.fit(flags.clone(), [0], [64], values.clone(), counts, [1])
        sent = Sent(torch.full_like(flags, 255)[None], torch.ones(64), [64])
        kernel.decay(inputs, references, [0], sent, 0.1)
        kernel.subtract(references, [0], sent)
        kernel.add_sums(inputs, references, [0], sent, torch.ones(2, dtype=dtype), 0)
        for value_format in SCALED_FORMATS:
            data, scales = encode_values(values, counts, value_format)
            decode_values(data, counts, scales, value_format)
        add_rows(
            torch.zeros(4, 2, dtype=dtype),
            torch.zeros(3, dtype=torch.int64),
            torch.ones(3, 2, dtype=dtype),
        )
    code = PositionCode(1024, 64)
    flags = torch.zeros(flags_num_bytes(1024), dtype=torch.uint8)
    code.decode_flags(code.encode(torch.arange(64)), 64, flags, [1024], "auto")
    code.encode_flags(flags, "auto")
    positions_of(flags, 64)
    layout = ActivationLayout((2, 8), 16, "int8", "int8")
    decode_forward(layout, encode_forward(layout, torch.ones(2, 8), None, 1))
    initial_rows(0, np.zeros(2, np.int64), np.arange(2), np.ones(1, np.float32), 3)
    cache = RowCache(2)
    for _ in range(2):
        cache.admit(np.arange(2))
    distinct(np.arange(2))
