"""A pipeline's state as one checkpoint, as a single process would have written it, and back to the stages' parts."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_dct.pipeline.mesh import PipelineMesh

State = dict[str, Any]


def to_cpu(state: Any) -> Any:
    """Copies of all tensors on the CPU, fit to be pickled."""
    return tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, state)


def gather_on_first(part: State, mesh: PipelineMesh) -> list[State]:
    """All stages' parts on global rank 0, one stage after the other; elsewhere this rank's alone."""
    parts = [part]
    for stage in range(1, mesh.stages if mesh.replica == 0 else 0):
        if mesh.stage == stage:
            dist.send_object_list([to_cpu(part)], dst=0, group=mesh.control)
        elif mesh.stage == 0:
            box: list[Any] = [None]
            dist.recv_object_list(box, src=stage, group=mesh.control)
            parts.append(box[0])
    return parts


def merge_state_dicts(mine: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> State:
    """The whole model's state: each stage's part in place of the meta tensors that stand for it."""
    merged = dict(mine)
    for part in parts:
        merged.update(part)
    return merged


def part_of_optimizer_state(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> State:
    """The state of the parameters that are on this rank.

    Args:
        state: What ``optimizer.state_dict()`` returns, or a saved one of the whole model.
        optimizer: Of all parameters, those on the meta device included, in the same order on every rank.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    here = {number for number, parameter in zip(numbers, parameters, strict=False) if not parameter.is_meta}
    # What belongs to no parameter stays.
    kept = {key: value for key, value in state["state"].items() if key in here or key not in numbers}
    return {**state, "state": kept}


def drop_foreign_state(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Forget the state of parameters on the meta device: it could neither be moved nor saved."""
    for optimizer in optimizers:
        # Adagrad and others make it in advance.
        for parameter in [parameter for parameter in optimizer.state if parameter.is_meta]:
            del optimizer.state[parameter]


@contextmanager
def loading_parts() -> Iterator[None]:
    """Load a whole model's state where some parameters are on the meta device, without a warning about each."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
        yield


def merge_optimizer_states(parts: Sequence[Mapping[str, Any]]) -> State:
    """The state of all parameters, in their order; what belongs to none is the first stage's."""
    merged: State = {}
    for part in reversed(parts):
        merged.update(part["state"])
    ordered = sorted(merged.items(), key=lambda item: (not isinstance(item[0], int), str(item[0]).zfill(12)))
    return {**parts[0], "state": dict(ordered)}
