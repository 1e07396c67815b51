"""Activations that cross from rank to rank: thresholded forward, the same entries backward."""

from lightning_dct.activations.module import CompressedModule

__all__ = ["CompressedModule"]
