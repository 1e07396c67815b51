"""A pipeline's state as one checkpoint, as a single process would write it, and back to the stages' parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_dct.pipeline.mesh import PipelineMesh, to_device

State = dict[str, Any]


def gather_on_first(part: State, mesh: PipelineMesh) -> list[State]:
    """All stages' parts on global rank 0, in order of stages; elsewhere this rank's alone."""
    parts = [part]
    for stage in range(1, mesh.stages if mesh.replica == 0 else 0):
        if mesh.stage == stage:
            dist.send_object_list([to_device(part, "cpu")], dst=0, group=mesh.control)
        elif mesh.stage == 0:
            box: list[Any] = [None]
            dist.recv_object_list(box, src=stage, group=mesh.control)
            parts.append(box[0])
    return parts


def part_of_optimizer_state(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> State:
    """The state of this rank's parameters, from ``optimizer.state_dict()`` or a saved one of the whole model.

    The optimizer has all parameters, including those on the meta device, in the same order on every rank.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    here = {number for number, parameter in zip(numbers, parameters, strict=False) if not parameter.is_meta}
    # State without a parameter stays.
    kept = {key: value for key, value in state["state"].items() if key in here or key not in numbers}
    return {**state, "state": kept}


def merge_optimizer_states(parts: Sequence[Mapping[str, Any]]) -> State:
    """The state of all parameters, in their order; state without a parameter is the first stage's."""
    merged: State = {}
    for part in reversed(parts):
        merged.update(part["state"])
    ordered = sorted(merged.items(), key=lambda item: (not isinstance(item[0], int), str(item[0]).zfill(12)))
    return {**parts[0], "state": dict(ordered)}
