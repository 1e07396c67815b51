"""Lightning callbacks: refreshed thresholds, densities that follow the training, monitoring, advice, and waiting."""

from lightning_dct.callbacks.accordion_schedule import AccordionSchedule
from lightning_dct.callbacks.auto_settings import AutoSettings
from lightning_dct.callbacks.compression_monitor import CompressionMonitor
from lightning_dct.callbacks.error_averaging import ErrorAveraging
from lightning_dct.callbacks.evaluation_join import EvaluationJoin
from lightning_dct.callbacks.failure_notice import FailureNotice
from lightning_dct.callbacks.run_advice import RunAdvice
from lightning_dct.callbacks.shared_weights_view import SharedWeightsView
from lightning_dct.callbacks.signals_after_step import SignalsAfterStep
from lightning_dct.callbacks.threshold_refresh import ThresholdRefresh

__all__ = [
    "AccordionSchedule",
    "AutoSettings",
    "CompressionMonitor",
    "ErrorAveraging",
    "EvaluationJoin",
    "FailureNotice",
    "RunAdvice",
    "SharedWeightsView",
    "SignalsAfterStep",
    "ThresholdRefresh",
]
