"""Names of an exchange's work in the profilers of Lightning and torch.

[Strategy]DCTStrategy.compress      add the residual, select, pack; start sending
[Strategy]DCTStrategy.exchange      wait for bytes that have not arrived yet
[Strategy]DCTStrategy.apply         read the payloads of updates, and add the mean to both sets of weights
[Strategy]DCTStrategy.decompress    read the payloads (``exchange="two_phase"``: and send their sum, compressed)
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

NAME = "[Strategy]DCTStrategy.{}"


def recorded(work: str) -> AbstractContextManager[Any]:
    """A span of ``torch.profiler``; none while nothing profiles, when it would take 6 microseconds."""
    # torch tells its own optimizers by this flag.
    profiles = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    return record_function(NAME.format(work)) if profiles else nullcontext()


def shown_by(trainer: Any) -> Callable[[str], AbstractContextManager[Any]]:
    """Spans of a Trainer's profiler; if it has none, of ``torch.profiler``, which a callback may run."""
    from lightning.pytorch.profilers import PassThroughProfiler

    profiler = trainer.profiler
    if isinstance(profiler, PassThroughProfiler):
        return recorded
    return lambda work: profiler.profile(NAME.format(work))
