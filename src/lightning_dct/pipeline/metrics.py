"""Lets torchmetrics metrics that only the ranks of the last stage have updated come out alike on every rank."""

from __future__ import annotations

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
        The metrics that now use it; to detach them set ``dist_sync_fn`` to None.

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
