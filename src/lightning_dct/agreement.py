"""Ranks that disagree on settings, versions or the model stop at setup, with the difference named."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module

from lightning_dct.__about__ import __version__


def describe_model(model: Module) -> dict[str, Any]:
    """What must be equal on all ranks about versions and the model, as small plain values."""
    parameters = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    return {
        "version of lightning_dct": __version__,
        "version of torch": torch.__version__,
        "number of parameters": sum(parameter.numel() for parameter in model.parameters()),
        "checksum of parameter names, shapes, dtypes and requires_grad": zlib.crc32(repr(parameters).encode()),
    }


def check_agreement(mine: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Compare what every rank says, and raise on every rank when two differ.

    Args:
        mine: This rank's settings by name; the same names on every rank.
        group: The ranks that must agree, or None for all.

    Raises:
        ValueError: The first setting that differs, with each rank's value.
    """
    everyone: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, dict(mine), group=group)
    for setting in mine:
        values = [theirs.get(setting) for theirs in everyone]
        if any(value != values[0] for value in values):
            said = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
            raise ValueError(f"The ranks disagree on `{setting}` ({said}). Give every rank the same.")
