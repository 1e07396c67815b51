"""A run that sets itself: the least lossy settings whose step stays near one without synchronisation.

    ladder      what may be chosen, from what loses least to what loses most, and the rule
    predicting  how long a step takes with each, by the model of ``lightning-dct plan``
    measuring   what that is predicted from, the same on every rank

:class:`~lightning_dct.callbacks.AutoSettings` does this while a run trains.
"""

from lightning_dct.auto.ladder import Choice, Option, choose, dense, describe, rungs, table_of
from lightning_dct.auto.measuring import agreed, measure_speeds
from lightning_dct.auto.predicting import Measured, predict_dense, predict_updates

__all__ = [
    "Choice",
    "Measured",
    "Option",
    "agreed",
    "choose",
    "dense",
    "describe",
    "measure_speeds",
    "predict_dense",
    "predict_updates",
    "rungs",
    "table_of",
]
