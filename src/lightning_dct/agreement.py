"""Ranks that disagree on settings, versions or the model stop at setup, with the difference named."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module

from lightning_dct.__about__ import __version__


def check_agreement(settings: Mapping[str, Any], model: Module, group: dist.ProcessGroup | None) -> None:
    """Compare settings, versions and the model over all ranks, and raise on every rank when two differ.

    Args:
        settings: This rank's settings by name; the same names on every rank.
        model: Its parameters' names, shapes, dtypes and whether they are trained are compared, but for those that
            DistributedDataParallel is told to ignore.
        group: The ranks that must agree, or None for all.

    Raises:
        ValueError: The first setting or parameter that differs, with each rank's value.
    """
    parameters = describe_parameters(model)
    checksum = zlib.crc32(repr(parameters).encode())
    mine = {"version of lightning_dct": __version__, "version of torch": torch.__version__, **settings}
    everyone = _gather({"mine": mine, "checksum": checksum}, group)
    for setting in mine:
        _compare(setting, [theirs["mine"].get(setting) for theirs in everyone])
    if any(theirs["checksum"] != checksum for theirs in everyone):
        # Only now are the models' descriptions worth sending; every rank has seen the same and does the same.
        descriptions = _gather(parameters, group)
        for name in dict.fromkeys(name for description in descriptions for name in description):
            _compare(f"parameter {name}", [description.get(name, "missing") for description in descriptions])
        _compare("order of the parameters", [list(description) for description in descriptions])


def describe_parameters(model: Module) -> dict[str, str]:
    """What must be equal on all ranks about each parameter, by name."""
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    return {
        name: f"{list(p.shape)} {str(p.dtype).removeprefix('torch.')} {'trained' if p.requires_grad else 'frozen'}"
        for name, p in model.named_parameters()
        if name not in ignored
    }


def _gather(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _compare(subject: str, values: list[Any]) -> None:
    if any(value != values[0] for value in values):
        said = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
        raise ValueError(f"The ranks disagree on `{subject}` ({said}). Give every rank the same.")
