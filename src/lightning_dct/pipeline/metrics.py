"""Makes torchmetrics metrics, which only the last stage updates, give the same value on every rank."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_dct.pipeline.mesh import PipelineMesh


class LastStageGather:
    """A ``dist_sync_fn`` for metrics: gathers over the last stages of all pipelines, and broadcasts to other stages.

    The default would gather over all ranks, most of which have never updated the metric: wrong for averaged states, and
    a mismatch of dtypes for lists.
    """

    def __init__(self, mesh: PipelineMesh) -> None:
        self._mesh = mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> LastStageGather:
        return self  # process groups cannot be copied, and metrics are

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """Every pipeline's state, on every rank."""
        gathered = None
        if self._mesh.is_last:
            gathered = [part.cpu() for part in gather_all_tensors(state, group=self._mesh.data_parallel)]
        return [part.to(state.device) for part in self._mesh.share(gathered, self._mesh.stages - 1)]


def attach(module: nn.Module, gather: LastStageGather) -> list[Metric]:
    """Make all metrics of a model use ``gather``, unless they have a ``dist_sync_fn``, and return those metrics.

    Raises:
        ValueError: A metric has ``dist_sync_on_step``, but not all ranks run steps to their end.
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
