"""DCT-DP: gradients synchronised under thresholds, with error feedback."""

from lightning_dct.gradients.correction import MomentumCorrection
from lightning_dct.gradients.plan import BucketPlan, plan_bucket
from lightning_dct.gradients.residual import Residuals
from lightning_dct.gradients.synchronizer import GradientSynchronizer
from lightning_dct.gradients.wrapping import (
    make_synchronizer,
    momentum_at_rest,
    parameter_names,
    resolve_process_group,
)

__all__ = [
    "BucketPlan",
    "GradientSynchronizer",
    "MomentumCorrection",
    "Residuals",
    "make_synchronizer",
    "momentum_at_rest",
    "parameter_names",
    "plan_bucket",
    "resolve_process_group",
]
