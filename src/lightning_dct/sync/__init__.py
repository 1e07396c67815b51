"""When ranks exchange: the clock of rounds, the weights that each rank has and those that all share, and gradients."""

from lightning_dct.sync.gradients import GradientSynchronizer
from lightning_dct.sync.shared_weights import SharedWeights
from lightning_dct.sync.synchronizer import Synchronizer
from lightning_dct.sync.updates import UpdateSynchronizer

__all__ = ["GradientSynchronizer", "SharedWeights", "Synchronizer", "UpdateSynchronizer"]
