"""Lightning callbacks: refreshed thresholds, what compression does to the traffic, and ranks that wait for others."""

from lightning_dct.callbacks.compression_monitor import CompressionMonitor
from lightning_dct.callbacks.evaluation_join import EvaluationJoin
from lightning_dct.callbacks.failure_notice import FailureNotice
from lightning_dct.callbacks.requeue_after_step import RequeueAfterStep
from lightning_dct.callbacks.threshold_refresh import ThresholdRefresh

__all__ = ["CompressionMonitor", "EvaluationJoin", "FailureNotice", "RequeueAfterStep", "ThresholdRefresh"]
