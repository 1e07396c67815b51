"""Says what a setting on the command line may have meant that no configuration has: Hydra names it and nothing else."""

from __future__ import annotations

from difflib import get_close_matches

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException


def explain_unknown_setting(error: BaseException) -> str | None:
    """The nearest names and all others beside a setting that is not known.

    Args:
        error: What Hydra has raised, or its exit after it has printed that.

    Returns:
        Lines for the user; None where something else was wrong.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    if cause is None or not isinstance(group := cause.parent_node, DictConfig):
        return None
    key, names = str(cause.key), [str(name) for name in group if not str(name).startswith("_")]
    if key in names or not names:
        return None
    nearest = get_close_matches(key, names, n=3)
    meant = f"Did you mean {' or '.join(nearest)}? " if nearest else ""
    where = str(cause.full_key).rpartition(".")[0]
    return f"{meant}Settings {f'of {where}' if where else 'and groups'}: {', '.join(sorted(names))}."
