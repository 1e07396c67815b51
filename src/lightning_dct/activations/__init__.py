"""Activations that cross from rank to rank: thresholded forward, the same entries backward."""

from lightning_dct.activations.codec import (
    Encoded,
    decode_backward,
    decode_forward,
    encode_backward,
    encode_forward,
)
from lightning_dct.activations.layout import ActivationLayout, activation_layout
from lightning_dct.activations.module import CompressedModule
from lightning_dct.activations.settings import SplitSettings
from lightning_dct.activations.split import Split
from lightning_dct.activations.split_point import SplitPoint
from lightning_dct.activations.subspace import CodePoint, subspace

__all__ = [
    "ActivationLayout",
    "CodePoint",
    "CompressedModule",
    "Encoded",
    "Split",
    "SplitPoint",
    "SplitSettings",
    "activation_layout",
    "decode_backward",
    "decode_forward",
    "encode_backward",
    "encode_forward",
    "subspace",
]
