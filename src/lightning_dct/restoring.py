"""Reads the ranks' state of a checkpoint, all ranks together: what fails on one of them fails on all of them.

A rank that went on alone would wait in its next collective for one that has stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_dct.checkpoint import CHECKPOINT_KEY, NOTE_FIELDS, check_note, empty_state, read_state
from lightning_dct.config import DCTConfig
from lightning_dct.state_file import CheckpointError


def agreed_notes(notes: Any, path: str) -> list[dict[str, Any]]:
    """What a checkpoint says about the state beside it, once all ranks have found the same; a collective call.

    Args:
        notes: The notes this rank has found in the checkpoint; none in one of plain DDP or of weights alone.
        path: The checkpoint.

    Raises:
        CheckpointError: A rank's notes are damaged, or two ranks have read different ones. Raised on every rank.
    """
    everyone: list[Any] = [notes]
    if dist.is_available() and dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, notes)
    told = []
    for theirs in everyone:
        if not isinstance(theirs, list):
            raise CheckpointError(f"The field {CHECKPOINT_KEY} of {path!r} is not a list. Resume with what saved it.")
        for note in theirs:
            check_note(note, path)
        told.append({(index, field): note.get(field) for index, note in enumerate(theirs) for field in NOTE_FIELDS})
    for index, field in dict.fromkeys(key for fields in told for key in fields):
        values = [fields.get((index, field)) for fields in told]
        if any(value != values[0] for value in values):
            said = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
            raise CheckpointError(
                f"The ranks have read different checkpoints from {path!r}: they disagree on its field"
                f" {CHECKPOINT_KEY}[{field!r}] ({said}). Give every rank the same file."
            )
    return notes


def restore_state(
    checkpoint_io: CheckpointIO,
    path: str,
    note: Mapping[str, Any],
    rank: int,
    world_size: int,
    stages: int,
    config: DCTConfig,
) -> dict[str, Any]:
    """The state that this rank starts from; a collective call.

    Args:
        checkpoint_io: What reads files.
        path: The checkpoint.
        note: What the checkpoint says about its state.
        rank: This rank.
        world_size: Ranks that take part now.
        stages: Over how many of them the parameters are spread now.
        config: The settings. ``missing_state`` says what to do when the file of any rank is missing, or was saved by a
            run that exchanged something else: ``"error"``, or ``"reset"`` to let every rank start without anything held
            back. All of them do: what two ranks remember of each other must agree.

    Raises:
        FileNotFoundError: The state of some rank is missing. Raised on every rank.
        CheckpointError: Some rank cannot use what it has read. Raised on every rank.
        ValueError: What was saved is of the other kind, gradients for updates or the reverse. Raised on every rank.
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
        return state if _is_kind(state, config.compress) else _of_other_kind(path, note, config)
    if config.missing_state == "reset" and all(missing for missing, _ in failed):
        rank_zero_warn(
            f"{failed[0][1]} That is set: training goes on from step {note['synchronisations']} with nothing held back"
            " on any rank, and gradient that had not been sent yet is lost."
        )
        return empty_state(note)
    if failure is not None:
        raise failure
    missing, message = failed[0]
    raise FileNotFoundError(message) if missing else CheckpointError(message)


def _is_kind(state: Mapping[str, Any], compress: str) -> bool:
    """Whether a state was saved by a run that exchanged this. Ranks save weights of their own with updates only."""
    return ("weights" in state) == (compress == "updates")


def _of_other_kind(path: str, note: Mapping[str, Any], config: DCTConfig) -> dict[str, Any]:
    other = "gradients" if config.compress == "updates" else "updates"
    told = (
        f"The checkpoint {path!r} was saved with `compress={other!r}`: what its ranks hold back are {other}, and this"
        f" run exchanges {config.compress}."
    )
    if config.missing_state == "error":
        raise ValueError(
            f"{told} Resume with `compress={other!r}`, or go on without what was held back: `missing_state='reset'`."
        )
    rank_zero_warn(f"{told} As is set, training goes on with nothing held back on any rank.")
    return empty_state(note)
