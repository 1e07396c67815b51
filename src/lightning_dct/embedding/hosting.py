"""Finds a model's sharded tables for a strategy, and includes their rows in Lightning's gradient clipping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_dct.clipping import clip_grad_norm
from lightning_dct.embedding.sharded import ShardedEmbeddingBags


def find_tables(model: Module) -> dict[str, ShardedEmbeddingBags]:
    """The sharded tables of a model, by name."""
    return {
        name.replace("_orig_mod.", ""): module
        for name, module in model.named_modules()
        if isinstance(module, ShardedEmbeddingBags)
    }


def install_clipping(precision: Any, tables: Mapping[str, ShardedEmbeddingBags]) -> None:
    """Clip by the norm over the rows of all ranks and the other parameters, if there are sharded tables.

    If ranks clipped by their own norms, replicas would differ. Lightning clips in the precision plugin, so this
    replaces two methods of that one object.
    """
    if not tables:
        return
    own = {id(module.weight) for module in tables.values()}
    group = next(iter(tables.values())).exchange_group.group

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        parameters: list[Tensor] = list(precision.main_params(optimizer))
        rows = [parameter for parameter in parameters if id(parameter) in own]
        others = [parameter for parameter in parameters if id(parameter) not in own]
        clip_grad_norm(rows, float(clip_val), group, shared=others)

    def clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
        for parameter in precision.main_params(optimizer):
            if parameter.grad is not None:
                values = parameter.grad._values() if parameter.grad.is_sparse else parameter.grad
                with torch.no_grad():
                    values.clamp_(-clip_val, clip_val)

    precision.clip_grad_by_norm = clip_grad_by_norm
    precision.clip_grad_by_value = clip_grad_by_value


def remove_clipping(precision: Any) -> None:
    """Undo :func:`install_clipping`, so that the plugin holds no reference to a table."""
    for method in ("clip_grad_by_norm", "clip_grad_by_value"):
        vars(precision).pop(method, None)
