"""Activations that cross from rank to rank: the largest, or codes of them, forward, and the same entries backward."""

from lightning_dct.activations.codec import (
    ActivationLayout,
    decode_backward,
    decode_forward,
    encode_backward,
    encode_forward,
)
from lightning_dct.activations.module import CompressedModule
from lightning_dct.activations.split_point import SplitPoint
from lightning_dct.activations.subspace import subspace

__all__ = [
    "ActivationLayout",
    "CompressedModule",
    "SplitPoint",
    "decode_backward",
    "decode_forward",
    "encode_backward",
    "encode_forward",
    "subspace",
]
