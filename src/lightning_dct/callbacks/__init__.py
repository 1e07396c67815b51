"""Lightning callbacks: when thresholds are refreshed, and what compression does to the traffic."""

from lightning_dct.callbacks.compression_monitor import CompressionMonitor
from lightning_dct.callbacks.evaluation_join import EvaluationJoin
from lightning_dct.callbacks.threshold_refresh import ThresholdRefresh

__all__ = ["CompressionMonitor", "EvaluationJoin", "ThresholdRefresh"]
