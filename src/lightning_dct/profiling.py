"""Names under which the work of the communication hook shows in profilers: Lightning's own, or torch's alone.

[Strategy]DCTStrategy.compress      add the residual, select, pack; start sending
[Strategy]DCTStrategy.exchange      wait for bytes that are still under way: what backward did not hide
[Strategy]DCTStrategy.decompress    read what has arrived (``exchange="sharded"``: and pass on its sum, compressed)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from torch.profiler import record_function


def recorded(work: str) -> AbstractContextManager[Any]:
    """A span of ``torch.profiler``. While nothing profiles it takes 5 microseconds."""
    return record_function(_name(work))


def shown_by(trainer: Any) -> Callable[[str], AbstractContextManager[Any]]:
    """Spans of a Trainer's profiler; where it has none, of ``torch.profiler``, which a callback may run.

    Args:
        trainer: A Trainer, as Any: Lightning sets ``profiler`` where type checkers do not see it.
    """
    profiler: Profiler = trainer.profiler
    if isinstance(profiler, PassThroughProfiler):
        return recorded
    return lambda work: profiler.profile(_name(work))


def _name(work: str) -> str:
    return f"[Strategy]DCTStrategy.{work}"
