"""Saves the dashboard in a W&B project; what can go wrong ends in one line that names the setting and the remedy."""

from __future__ import annotations

from collections.abc import Sequence

import wandb
from wandb.errors import AuthenticationError, CommError, UsageError

from lightning_dct.dashboard.building import make_workspace


class PushError(Exception):
    """The dashboard could not be saved; the message says why and what to do."""


def push(entity: str | None, project: str, name: str, quality: Sequence[str]) -> str:
    """Save the dashboard as a new view of a project.

    Args:
        entity: Whose project it is; None for the default entity of whoever is logged in.
        project: Where the runs are.
        name: What the view is called.
        quality: See :func:`~lightning_dct.dashboard.contents.sections`.

    Returns:
        The URL of the view.

    Raises:
        PushError: Nobody is logged in, W&B cannot be reached, or there is no such project.
    """
    try:
        api = wandb.Api()
        owner = entity or api.default_entity
    except (AuthenticationError, UsageError) as error:
        raise PushError(
            f"no way into W&B: {error} Run `wandb login`, or set WANDB_API_KEY, and WANDB_BASE_URL for a server of your"
            " own. `--output FILE` needs no login."
        ) from error
    if not owner:
        raise PushError("W&B knows no default entity of yours. Say whose project it is: `--entity NAME`.")
    try:
        # Reading anything of a project asks W&B for it.
        _ = api.project(project, owner).id
    except ValueError as error:
        raise PushError(
            f"W&B has no project {project!r} of the entity {owner!r}, or you may not see it. Check `--project` and"
            f" `--entity`, or log a run there first: `WandbLogger(project={project!r})`."
        ) from error
    try:
        url: str = make_workspace(owner, project, name, quality).save().url
    except (CommError, ValueError) as error:
        raise PushError(f"W&B did not take the dashboard: {error}") from error
    return url
