"""Lightning callbacks: refreshed thresholds, monitoring, advice, and what ends a run."""

from lightning_dct.callbacks.auto_settings import AutoSettings
from lightning_dct.callbacks.compression_monitor import CompressionMonitor
from lightning_dct.callbacks.embedding_pruning import EmbeddingPruning
from lightning_dct.callbacks.evaluations import EvaluationJoin, SharedWeightsView
from lightning_dct.callbacks.failures import FailureNotice, SignalsAfterStep
from lightning_dct.callbacks.run_advice import RunAdvice
from lightning_dct.callbacks.threshold_refresh import ThresholdRefresh

__all__ = [
    "AutoSettings",
    "CompressionMonitor",
    "EmbeddingPruning",
    "EvaluationJoin",
    "FailureNotice",
    "RunAdvice",
    "SharedWeightsView",
    "SignalsAfterStep",
    "ThresholdRefresh",
]
