"""Reads the ranks' state of a checkpoint collectively: an error on one rank is raised on all of them.

Otherwise the other ranks would wait for it in their next collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_dct.agreement import gather_objects
from lightning_dct.checkpoint import CHECKPOINT_KEY, NOTE_FIELDS, check_note, empty_state, read_state
from lightning_dct.state_file import CheckpointError

# The errors after which `missing_state="reset"` continues.
RESETTABLE = (FileNotFoundError, ValueError)


def agreed_notes(notes: Any, path: str) -> list[dict[str, Any]]:
    """The notes that this rank found in a checkpoint, if all ranks found the same; a collective call.

    A checkpoint of plain DDP or of weights alone has none.

    Raises:
        CheckpointError: A rank's notes are corrupt, or two ranks read different ones. Raised on every rank.
    """
    everyone = gather_objects(notes)
    for theirs in everyone:
        if not isinstance(theirs, list):
            raise CheckpointError(f"The field {CHECKPOINT_KEY} of {path!r} is not a list. Resume with what saved it.")
        for note in theirs:
            check_note(note, path)
    for index, field in product(range(max(map(len, everyone))), NOTE_FIELDS):
        values = [theirs[index].get(field) if index < len(theirs) else None for theirs in everyone]
        if any(value != values[0] for value in values):
            per_rank = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
            raise CheckpointError(
                f"The ranks have read different checkpoints from {path!r}: they disagree on its field"
                f" {CHECKPOINT_KEY}[{field!r}] ({per_rank}). Give every rank the same file."
            )
    return notes


def restore_state(strategy: Any, path: str, note: Mapping[str, Any]) -> dict[str, Any]:
    """The state that this rank starts from; a collective call.

    ``strategy`` is any of this package's, and ``note`` has been checked. If any rank's file is missing or was saved
    with another ``compress``, ``config.missing_state`` chooses: an error, or all ranks start without residuals.

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
        # Ranks save weights of their own only if updates are exchanged.
        if ("weights" in state) != (config.compress == "updates"):
            other = "gradients" if config.compress == "updates" else "updates"
            raise ValueError(
                f"The checkpoint {path!r} was saved with `compress={other!r}`: the ranks' residuals are {other}, and"
                f" this run exchanges {config.compress}. Resume with `compress={other!r}`, or continue without the"
                " ranks' residuals: `missing_state='reset'` in the strategy."
            )
    except Exception as error:
        failure = error
    kind = type(failure) if type(failure) in RESETTABLE else CheckpointError
    mine = None if failure is None else (kind, str(failure))
    failed = [theirs for theirs in gather_objects(mine) if theirs is not None]
    if not failed:
        return state
    if config.missing_state == "reset" and all(kind in RESETTABLE for kind, _ in failed):
        rank_zero_warn(
            f"{failed[0][1]} That is set: training continues from step {note['synchronisations']} with an empty"
            " residual on every rank. What had not been sent yet is lost."
        )
        return empty_state(note)
    if failure is not None:
        raise failure
    kind, message = failed[0]
    raise kind(message)
