"""What a rank knows of each tensor whose gradients it compresses: how much goes, above which threshold, what waits."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from lightning_dct.gradients.plan import real_numel
from lightning_dct.gradients.synchronizer import Synchronizer


class TensorFigures(NamedTuple):
    """One tensor, seen from one rank.

    Attributes:
        name: The parameter.
        entries: How many it has.
        density: Share of them that the next synchronisation may send, in (0, 1].
        threshold: Magnitude from which on an entry goes. Where the tensor is cut into pieces with a threshold each, as
            with ``exchange="sharded"``, their median. None for a tensor sent dense.
        residual_norm: Euclidean norm of what this rank holds back of it.
    """

    name: str
    entries: int
    density: float
    threshold: float | None
    residual_norm: float


def figures_by_tensor(synchronizer: Synchronizer) -> list[TensorFigures]:
    """The figures of all tensors that are synchronised, in the model's order; no communication.

    A tensor that is to be compressed, but of which nothing has been so far, is left out: it has taken no part yet, or
    its gradients are sparse and go as they are.
    """
    thresholds: dict[str, list[float]] = {name: [] for name in synchronizer.parameter_names.values()}
    for label, value in synchronizer.thresholds.by_label().items():
        # A piece's label is the parameter's name and a range. Owners' thresholds on sums are under no such name.
        name = label if label in thresholds else label.rpartition("[")[0]
        if name in thresholds:
            thresholds[name].append(value)
    norms = synchronizer.norms()
    figures = []
    for parameter, name in synchronizer.parameter_names.items():
        density = synchronizer.density_of(parameter)
        if parameter.requires_grad and (thresholds[name] or density == 1.0):
            threshold = statistics.median(thresholds[name]) if density < 1.0 else None
            figures.append(TensorFigures(name, real_numel(parameter), density, threshold, norms.get(name, 0.0)))
    return figures
