"""Lightning callbacks: refreshed thresholds, scheduled densities, monitoring, advice, and what ends a run."""

from lightning_dct.callbacks.accordion_schedule import AccordionSchedule
from lightning_dct.callbacks.auto_settings import AutoSettings
from lightning_dct.callbacks.compression_monitor import CompressionMonitor
from lightning_dct.callbacks.evaluation_join import EvaluationJoin
from lightning_dct.callbacks.failures import FailureNotice, SignalsAfterStep
from lightning_dct.callbacks.periodic import ErrorAveraging, ThresholdRefresh
from lightning_dct.callbacks.run_advice import RunAdvice
from lightning_dct.callbacks.shared_weights_view import SharedWeightsView

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
