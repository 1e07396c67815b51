"""Lets torchmetrics metrics that only the ranks of the last stage have updated come out alike on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_dct.pipeline.mesh import PipelineMesh


class LastStageGather:
    """A ``dist_sync_fn`` for metrics: gathers over the last stages of all pipelines, and tells the other stages.

    Without it a metric would be synchronised over all ranks, most of which have never updated it: wrong for states
    that are averaged, and a mismatch of dtypes for states that are lists.
    """

    def __init__(self, mesh: PipelineMesh) -> None:
        self._mesh = mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> LastStageGather:
        # Metrics are copied with all they have; process groups cannot be.
        return self

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """Every pipeline's state, on every rank."""
        gathered = None
        if self._mesh.is_last:
            gathered = [part.cpu() for part in gather_all_tensors(state, group=self._mesh.data_parallel)]
        return [part.to(state.device) for part in self._mesh.share(gathered, self._mesh.stages - 1)]


def attach(module: nn.Module, gather: LastStageGather) -> list[Metric]:
    """Make all metrics of a model use ``gather``, but for those that have a function of the user's.

    Returns:
        The metrics that now use it, in the same order on every rank.

    Raises:
        ValueError: A metric wants to be synchronised in the middle of steps, which not all ranks run.
    """
    for name, child in module.named_modules():
        if isinstance(child, Metric) and child.dist_sync_on_step:
            raise ValueError(
                f"The metric {name!r} has `dist_sync_on_step=True`. Under `DCTPipelineStrategy` steps end on the last"
                " stage only, and metrics are synchronised when an epoch ends. Leave the setting out."
            )
    found = [child for child in module.modules() if isinstance(child, Metric) and child.dist_sync_fn is None]
    for metric in found:
        metric.dist_sync_fn = gather
    return found


def detach(metrics: Iterable[Metric]) -> None:
    """Undo :func:`attach`."""
    for metric in metrics:
        metric.dist_sync_fn = None


def update_counts(metrics: Iterable[Metric]) -> list[int]:
    """How often each has been updated since it was reset."""
    return [metric._update_count for metric in metrics]


def note_updates(metrics: Iterable[Metric], counts: Iterable[int]) -> None:
    """Tell this rank's metrics how often the last stage has updated its own.

    Without it they would warn that they compute without data, and return again what they have computed once.
    """
    for metric, count in zip(metrics, counts, strict=True):
        if metric._update_count != count:
            # A hack: torchmetrics has no other way to say so.
            metric._update_count, metric._computed = count, None
