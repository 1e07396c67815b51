"""DCT-DP: gradients synchronised under thresholds, with error feedback."""

from lightning_dct.gradients.plan import BucketPlan, plan_bucket
from lightning_dct.gradients.residual import Residuals
from lightning_dct.gradients.synchronizer import GradientSynchronizer

__all__ = ["BucketPlan", "GradientSynchronizer", "Residuals", "plan_bucket"]
