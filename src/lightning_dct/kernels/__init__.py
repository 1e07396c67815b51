"""The hot path over memory: add the gradient to the residual, compare, compact."""

from lightning_dct.kernels.reference import Selection, select

__all__ = ["Selection", "select"]
