"""What a rank compares with the others before it starts with them or joins them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch.nn import Module

from lightning_dct.__about__ import __version__
from lightning_dct.agreement import describe_parameters
from lightning_dct.config import DCTConfig


def settings_of(module: Module, config: DCTConfig, fit: int) -> dict[str, str]:
    """What must be the same on a rank that joins; what is trained may change during a fit."""
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
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in names)
