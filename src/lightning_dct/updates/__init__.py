"""The exchange of weight updates every ``local_steps`` optimizer steps, after the user's own optimizer."""

from lightning_dct.updates.shared_weights import SharedWeights
from lightning_dct.updates.synchronizer import UpdateSynchronizer

__all__ = ["SharedWeights", "UpdateSynchronizer"]
