"""Compares a rank with the others before it starts with them or joins them, and takes their settings."""

import zlib
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from torch import Tensor
from torch.nn import Module

from lightning_dct.__about__ import __version__
from lightning_dct.agreement import describe_parameters
from lightning_dct.checksums import checksum_of
from lightning_dct.config import DCTConfig
from lightning_dct.elastic.elastic_updates import Header
from lightning_dct.elastic.present import PresentRanks


def refuse_searches(trainer: pl.Trainer) -> None:
    """Refuse callbacks that train on trial and then restore a checkpoint on all ranks (ValueError)."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, LearningRateFinder | BatchSizeFinder):
            raise ValueError(
                f"`strategy='dct_elastic'` cannot run `{type(callback).__name__}`, because each rank would search by"
                " itself. Run the search first, on one machine with `strategy='auto'` or `'dct'`, and give its result"
                " to the model."
            )


def settings_of(module: Module, config: DCTConfig, fit: int) -> dict[str, str]:
    """Settings that a rank which joins must have, too. The trained parameters may change during a fit."""
    parameters = {name: said.rpartition(" ")[0] for name, said in describe_parameters(module).items()}
    chosen = {name: repr(value) for name, value in vars(config).items() if name != "kernel"}
    versions = {"lightning_dct": __version__, "torch": torch.__version__}
    return {**chosen, **versions, "parameters": f"{zlib.crc32(repr(parameters).encode()):x}", "fit": str(fit)}


def compare_settings(theirs: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Compare the settings of a run with those of a rank that joins it.

    Raises:
        ValueError: They differ.
    """
    if theirs["fit"] != own["fit"]:
        raise ValueError(
            f"This rank is in fit {own['fit']} of its process, and the run that it would join is in fit"
            f" {theirs['fit']}. Use a script for each fit, or let all ranks end each fit at the same step."
            " A rank that is started again can join the first fit only."
        )
    if theirs != own:
        raise ValueError(
            f"The settings of this rank differ from the settings of the run that it joins. The run has"
            f" {theirs}, and this rank has {own}. Use the same on all ranks."
        )


def trained_names(module: Module) -> list[str]:
    """The parameters that are trained now."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def train_only(module: Module, names: list[str]) -> None:
    """Freeze and unfreeze parameters as a peer has."""
    trained = set(names)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trained)


def compare_starts(
    present: PresentRanks, checkpoint: Mapping[str, Any], rank: int, path: Any, patience_s: float
) -> bool:
    """Compare the checkpoints from which ranks start, and wait ``patience_s`` seconds for the slowest to read its own.

    Returns:
        Whether all ranks have; if not, one has gone or is slower, and the ranks must meet again.

    Raises:
        ValueError: The checkpoints differ.
    """
    tensors = [value for value in checkpoint["state_dict"].values() if isinstance(value, Tensor)]
    digest = zlib.crc32(repr([checksum_of(tensor) for tensor in tensors]).encode())
    # In a header's fields, because another rank may send one in this meeting.
    said = Header(digest, int(checkpoint["global_step"]), 0, 0, 0)
    seen = present.gather(torch.tensor(said, dtype=torch.int64), patience_s)
    if seen is None:
        present.agree()  # that the meeting has failed
        return False
    if bool((seen != seen[0]).any()):
        raise ValueError(
            f"The ranks start with different checkpoints; that of rank {rank} is {path}. Copy the same file and folder"
            " to every machine."
        )
    return True


def checkpoint_folders(trainer: pl.Trainer) -> list[str | None]:
    """Where each checkpoint callback writes; a rank by itself may find another version of a logger's folder."""
    found = [getattr(one, "dirpath", None) for one in trainer.checkpoint_callbacks]
    return [None if path is None else str(path) for path in found]


def use_checkpoint_folders(trainer: pl.Trainer, folders: list[str | None]) -> None:
    """Have the checkpoint callbacks write where those of another rank do."""
    for one, path in zip(trainer.checkpoint_callbacks, folders, strict=True):
        if path is not None:
            one.dirpath = path  # type: ignore[attr-defined]
