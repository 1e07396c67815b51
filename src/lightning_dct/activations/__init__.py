"""Compressed activations between ranks, and their gradients at the same entries."""

from lightning_dct.activations.codec import (
    ActivationLayout,
    decode_backward,
    decode_forward,
    encode_backward,
    encode_forward,
)
from lightning_dct.activations.module import CompressedModule, module_settings, modules_of, plain_name
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
    "module_settings",
    "modules_of",
    "plain_name",
    "subspace",
]
