"""Reads the ranks' state of a checkpoint, all ranks together: what fails on one of them fails on all of them.

A rank that went on alone would wait in its next collective for one that has stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_dct.checkpoint import empty_state, read_state
from lightning_dct.config import MissingState


def restore_state(
    checkpoint_io: CheckpointIO,
    path: str,
    note: Mapping[str, Any],
    rank: int,
    world_size: int,
    stages: int,
    missing_state: MissingState,
) -> dict[str, Any]:
    """The state that this rank starts from; a collective call.

    Args:
        checkpoint_io: What reads files.
        path: The checkpoint.
        note: What the checkpoint says about its state.
        rank: This rank.
        world_size: Ranks that take part now.
        stages: Over how many of them the parameters are spread now.
        missing_state: What to do when the file of any rank is missing: ``"error"``, or ``"reset"`` to let every rank
            start without anything held back. All of them do: what two ranks remember of each other must agree.

    Raises:
        FileNotFoundError: The state of some rank is missing. Raised on every rank.
        ValueError: Some rank cannot use what it has read. Raised on every rank.
    """
    state: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        state = read_state(checkpoint_io, path, note, rank, world_size, stages)
    except Exception as error:
        failure = error
    mine = None if failure is None else (isinstance(failure, FileNotFoundError), str(failure))
    failures: list[tuple[bool, str] | None] = [None] * world_size
    dist.all_gather_object(failures, mine)
    failed = [told for told in failures if told is not None]
    if not failed:
        return state
    if missing_state == "reset" and all(missing for missing, _ in failed):
        rank_zero_warn(
            f"{failed[0][1]} That is set: training goes on from step {note['synchronisations']} with nothing held back"
            " on any rank, and gradient that had not been sent yet is lost."
        )
        return empty_state(note)
    if failure is not None:
        raise failure
    missing, message = failed[0]
    raise FileNotFoundError(message) if missing else ValueError(message)
