"""A pipeline's state as one checkpoint, as a single process would write it, and back to the stages' parts."""

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
    """A tree with its tensors on the CPU, which can be pickled."""
    return tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, state)


def gather_on_first(part: State, mesh: PipelineMesh) -> list[State]:
    """All stages' parts on global rank 0, in order of stages; elsewhere this rank's alone."""
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
    """The whole model's state: each stage's part replaces the meta tensors that stand for it."""
    merged = dict(mine)
    for part in parts:
        merged.update(part)
    return merged


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


def drop_foreign_state(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Forget the state of parameters on the meta device, which Adagrad and others create in advance."""
    for optimizer in optimizers:
        for parameter in [parameter for parameter in optimizer.state if parameter.is_meta]:
            del optimizer.state[parameter]


@contextmanager
def loading_parts() -> Iterator[None]:
    """Suppress the warnings about parameters on the meta device while the whole model's state is loaded."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
        yield


def merge_optimizer_states(parts: Sequence[Mapping[str, Any]]) -> State:
    """The state of all parameters, in their order; state without a parameter is the first stage's."""
    merged: State = {}
    for part in reversed(parts):
        merged.update(part["state"])
    ordered = sorted(merged.items(), key=lambda item: (not isinstance(item[0], int), str(item[0]).zfill(12)))
    return {**parts[0], "state": dict(ordered)}
