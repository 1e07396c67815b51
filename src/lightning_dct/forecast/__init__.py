"""Bytes and time of a run before it starts: the code behind ``lightning-dct plan``.

    workload      what is synchronised: tensors, and the buckets that DistributedDataParallel puts them into
    bytes_sent    what each rank hands to the collectives in a step, by exchange, to the byte
    speed         how fast this machine compresses, measured for a moment
    forecast      bytes over the rate of a link, residuals, and what ``exchange="auto"`` takes
    report        all that as text

Sizes come from the plans, the shards and the traffic formulas that a run uses. Only the order of collectives is
repeated here; tests compare it with the counters of runs.
"""

from lightning_dct.forecast.forecast import Forecast, Row, make_forecast
from lightning_dct.forecast.speed import Speed, measure_speed
from lightning_dct.forecast.workload import Workload, load_module, one_tensor, workload_of

__all__ = [
    "Forecast",
    "Row",
    "Speed",
    "Workload",
    "load_module",
    "make_forecast",
    "measure_speed",
    "one_tensor",
    "workload_of",
]
