"""The wire format: selected entries as one ``uint8`` tensor, and back. Pure functions.

A payload holds, in this order, for ``T`` compressed tensors and at most ``K`` of ``N`` entries (integers are
little-endian, and all sizes follow from the layout, so every rank knows them beforehand):

==================  =====================================  ====================================================
part                bytes                                  holds
==================  =====================================  ====================================================
header              12                                     see :mod:`lightning_dct.wire.payload`
scales              ``4 T`` (int8 to 1bit)                 one fp32 scale a tensor
positions           about ``K (2 + log2(N / K)) / 8``      see :mod:`lightning_dct.wire.positions`
values              ``4 K`` (fp32) to ``K / 8`` (1bit)     see :mod:`lightning_dct.wire.values`
dense tensors       their own bytes                        tensors too small to compress, in their own dtype
==================  =====================================  ====================================================
"""

from lightning_dct.wire.bitmaps import Bitmaps
from lightning_dct.wire.payload import (
    PayloadLayout,
    Unpacked,
    pack,
    read_scales,
    unpack,
    unpack_flags,
    unpack_stretch,
    unpack_values,
)
from lightning_dct.wire.payloads_on_device import Arrived, SideBySide
from lightning_dct.wire.positions import PayloadError, PositionCode, count_flags
from lightning_dct.wire.values import BITS_PER_VALUE, decode_values, encode_values

__all__ = [
    "BITS_PER_VALUE",
    "Arrived",
    "Bitmaps",
    "PayloadError",
    "PayloadLayout",
    "PositionCode",
    "SideBySide",
    "Unpacked",
    "count_flags",
    "decode_values",
    "encode_values",
    "pack",
    "read_scales",
    "unpack",
    "unpack_flags",
    "unpack_stretch",
    "unpack_values",
]
