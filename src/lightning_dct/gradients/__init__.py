"""Gradients of all ranks, averaged under thresholds, and the parts that the exchange of updates shares."""

from lightning_dct.gradients.hook import GradientSynchronizer
from lightning_dct.gradients.memory import Residuals
from lightning_dct.gradients.plan import BucketPlan, plan_bucket
from lightning_dct.gradients.synchronizer import Synchronizer

__all__ = [
    "BucketPlan",
    "GradientSynchronizer",
    "Residuals",
    "Synchronizer",
    "plan_bucket",
]
