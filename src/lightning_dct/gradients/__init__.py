"""Gradients of all ranks, averaged under thresholds, and the parts that the exchange of updates shares."""

from lightning_dct.gradients.hook import GradientSynchronizer
from lightning_dct.gradients.synchronizer import Synchronizer

__all__ = ["GradientSynchronizer", "Synchronizer"]
