"""Compares a rank with the others before it starts with them or joins them, and takes their
settings.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn import Module

from lightning_dct.__about__ import __version__
from lightning_dct.agreement import describe_parameters
from lightning_dct.checksums import checksum_of
from lightning_dct.config import DCTConfig
from lightning_dct.elastic.elastic_updates import Header, gather_headers
from lightning_dct.elastic.present import PresentRanks


def settings_of(module: Module, config: DCTConfig, fit: int) -> dict[str, str]:
    """Settings that a rank which joins must have, too.

    The trained parameters may change during a fit.
    """
    parameters = {
        name: description.rpartition(" ")[0]
        for name, description in describe_parameters(module).items()
    }
    chosen = {name: repr(value) for name, value in vars(config).items() if name != "kernel"}
    versions = {"lightning_dct": __version__, "torch": torch.__version__}
    return {
        **chosen,
        **versions,
        "parameters": f"{zlib.crc32(repr(parameters).encode()):x}",
        "fit": str(fit),
    }


def compare_settings(theirs: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Compare the settings of a run with those of a rank that joins it (ValueError if they
    differ).
    """
    if theirs["fit"] != own["fit"]:
        raise ValueError(
            f"This rank is in fit {own['fit']} of its process, and the run that it would join is in"
            f" fit {theirs['fit']}. A rank that is started again can join the first fit only: use a"
            " script for each fit."
        )
    if theirs != own:
        raise ValueError(
            f"The settings of this rank differ from those of the run that it joins, {theirs}: it"
            f" has {own}. Use the same on all ranks."
        )


def trained_names(module: Module) -> list[str]:
    """The parameters that are trained now."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def compare_starts(
    present: PresentRanks, checkpoint: Mapping[str, Any], rank: int, path: Any, patience_s: float
) -> bool:
    """Compare the checkpoints from which ranks start (ValueError if they differ), and whether all
    have read theirs.

    This waits ``patience_s`` seconds for the slowest. If one has gone or is slower, the ranks must
    meet again.
    """
    tensors = [value for value in checkpoint["state_dict"].values() if isinstance(value, Tensor)]
    digest = zlib.crc32(repr([checksum_of(tensor) for tensor in tensors]).encode())
    # In a header's fields, because another rank may send one in this meeting.
    seen = gather_headers(
        present, Header(digest, int(checkpoint["global_step"]), 0, 0, 0), patience_s
    )
    if not seen:
        present.should_commit()  # that the meeting has failed
    if len(set(seen)) > 1:
        raise ValueError(
            f"The ranks start with different checkpoints; that of rank {rank} is {path}. Copy the"
            " same file and folder to every machine."
        )
    return bool(seen)


def situation_of(module: pl.LightningModule, length: Sequence[Any]) -> dict[str, Any]:
    """What a rank takes from this one when it starts with it or joins it, beside its state, as
    plain data.

    The folders of checkpoint callbacks are there because that rank may find another version of a
    logger's folder.
    """
    found = [getattr(one, "dirpath", None) for one in module.trainer.checkpoint_callbacks]
    folders = [None if path is None else str(path) for path in found]
    return {"length": list(length), "folders": folders, "trained": trained_names(module)}


def take_situation(module: pl.LightningModule, situation: Mapping[str, Any]) -> None:
    """Write checkpoints where another rank does, and train the same parameters."""
    for one, path in zip(module.trainer.checkpoint_callbacks, situation["folders"], strict=True):
        if path is not None:
            one.dirpath = path  # type: ignore[attr-defined]
    trained = set(situation["trained"])
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trained)
