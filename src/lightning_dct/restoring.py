"""Reads the ranks' state of a checkpoint collectively: an error on one rank is raised on all of them.

Otherwise the other ranks would wait for it in their next collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_dct.agreement import gather_objects
from lightning_dct.checkpoint import CHECKPOINT_KEY, NOTE_FIELDS, check_note, empty_state, read_state
from lightning_dct.state_file import CheckpointError


def agreed_notes(notes: Any, path: str) -> list[dict[str, Any]]:
    """The notes that this rank found in a checkpoint, if all ranks found the same; a collective call.

    A checkpoint of plain DDP or of weights alone has none.

    Raises:
        CheckpointError: A rank's notes are corrupt, or two ranks read different ones. Raised on every rank.
    """
    found = []
    for theirs in gather_objects(notes):
        if not isinstance(theirs, list):
            raise CheckpointError(f"The field {CHECKPOINT_KEY} of {path!r} is not a list. Resume with what saved it.")
        for note in theirs:
            check_note(note, path)
        found.append({(index, field): note.get(field) for index, note in enumerate(theirs) for field in NOTE_FIELDS})
    for index, field in dict.fromkeys(key for fields in found for key in fields):
        values = [fields.get((index, field)) for fields in found]
        if any(value != values[0] for value in values):
            per_rank = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
            raise CheckpointError(
                f"The ranks have read different checkpoints from {path!r}: they disagree on its field"
                f" {CHECKPOINT_KEY}[{field!r}] ({per_rank}). Give every rank the same file."
            )
    return notes


def restore_state(strategy: Any, path: str, note: Mapping[str, Any]) -> dict[str, Any]:
    """The state from which this rank of a strategy of this package starts; a collective call.

    :func:`~lightning_dct.checkpoint.read_state` explains the other arguments. ``config.missing_state`` decides what
    happens if any rank's file is missing or was saved with another ``compress``: ``"error"``, or ``"reset"``, with
    which every rank starts without residuals. All ranks reset, because their states must agree.

    Raises:
        FileNotFoundError: The state of some rank is missing. Raised on every rank.
        CheckpointError: Some rank cannot use the file it read. Raised on every rank.
        ValueError: The state was saved with another ``compress``. Raised on every rank.
    """
    config, state = strategy.config, {}
    failure: Exception | None = None
    try:
        layout = strategy.global_rank, strategy.world_size, strategy.stages
        state = read_state(strategy.checkpoint_io, path, note, *layout)
    except Exception as error:
        failure = error
    mine = None if failure is None else (isinstance(failure, FileNotFoundError), str(failure))
    failed = [theirs for theirs in gather_objects(mine) if theirs is not None]
    if not failed:
        # Ranks save weights of their own only if updates are exchanged.
        return state if ("weights" in state) == (config.compress == "updates") else _of_other_kind(strategy, path, note)
    if config.missing_state == "reset" and all(missing for missing, _ in failed):
        rank_zero_warn(
            f"{failed[0][1]} That is set: training continues from step {note['synchronisations']} with an empty"
            " residual on every rank. What had not been sent yet is lost."
        )
        return empty_state(note)
    if failure is not None:
        raise failure
    missing, message = failed[0]
    raise FileNotFoundError(message) if missing else CheckpointError(message)


def _of_other_kind(strategy: Any, path: str, note: Mapping[str, Any]) -> dict[str, Any]:
    compress = strategy.config.compress
    other = "gradients" if compress == "updates" else "updates"
    problem = (
        f"The checkpoint {path!r} was saved with `compress={other!r}`: the ranks' residuals are {other}, and this run"
        f" exchanges {compress}."
    )
    if strategy.config.missing_state == "error":
        raise ValueError(
            f"{problem} Resume with `compress={other!r}`, or continue without the residuals: `missing_state='reset'`."
        )
    rank_zero_warn(f"{problem} As is set, training continues with an empty residual on every rank.")
    return empty_state(note)
