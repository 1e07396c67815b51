"""What weights have moved, exchanged every so many optimizer steps, behind an optimizer that nobody touches."""

from lightning_dct.updates.shared_weights import SharedWeights
from lightning_dct.updates.synchronizer import UpdateSynchronizer

__all__ = ["SharedWeights", "UpdateSynchronizer"]
