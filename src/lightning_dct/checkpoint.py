"""Where each rank's compression state lies beside a Lightning checkpoint, and how it is carried to another world size.

    epoch=3.ckpt                          Lightning's file, with a note saying which state belongs to it
    epoch=3.ckpt.dct/
        000000001200-rank-0-of-2.pt       residuals, thresholds and counters of rank 0 after 1200 synchronisations
        000000001200-rank-1-of-2.pt

Every rank writes its own file before Lightning's is written, under a name that holds the number of synchronisations:
a job killed in the middle of overwriting a checkpoint finds the old file together with the old state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

CHECKPOINT_KEY = "lightning_dct"
FORMAT_VERSION = 1


def make_note(world_size: int, synchronisations: int) -> dict[str, int]:
    """What Lightning's checkpoint says about the state that lies beside it."""
    return {"format_version": FORMAT_VERSION, "world_size": world_size, "synchronisations": synchronisations}


def state_folder(checkpoint_path: str) -> str:
    """The folder that holds the ranks' files of a checkpoint."""
    return f"{checkpoint_path}.dct"


def state_path(checkpoint_path: str, note: Mapping[str, int], rank: int) -> str:
    """The file of one rank."""
    name = f"{note['synchronisations']:012d}-rank-{rank}-of-{note['world_size']}.pt"
    return f"{state_folder(checkpoint_path)}/{name}"


def check_note(note: Mapping[str, Any], checkpoint_path: str) -> None:
    """Refuse what another version of the format has written.

    Raises:
        ValueError: The note is of another version, or is no note.
    """
    if note.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"The compression state of {checkpoint_path!r} has format version {note.get('format_version')!r}; this"
            f" lightning_dct reads version {FORMAT_VERSION}. Resume with the version that saved it."
        )


def saved_ranks_for(rank: int, world_size: int, saved_world_size: int) -> list[int]:
    """Whose files a rank reads: its own, or everybody's when the number of ranks has changed."""
    return [rank] if world_size == saved_world_size else list(range(saved_world_size))


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state a rank starts from, made of those it has read.

    What the ranks hold back enters the model as the *mean* of their residuals. Giving every rank of a new world the
    mean of the old residuals conserves that mean whatever the two world sizes are. It is taken in fp64.

    Args:
        states: One state (its own), or those of all ranks of the saved world.
    """
    if len(states) == 1:
        return dict(states[0])
    merged = dict(states[0])
    names = {name for state in states for name in state["residuals"]}
    merged["residuals"] = {
        name: _mean([state["residuals"][name] for state in states if name in state["residuals"]], len(states))
        for name in sorted(names)
    }
    return merged


def _mean(residuals: Sequence[Tensor], world_size: int) -> Tensor:
    total = torch.stack([residual.to(torch.float64) for residual in residuals]).sum(dim=0)
    return (total / world_size).to(residuals[0].dtype)
