"""The dashboard as a workspace of the package wandb-workspaces: built, written as JSON, or saved in a W&B project."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import wandb
from wandb.errors import AuthenticationError, CommError, UsageError
from wandb_workspaces import workspaces
from wandb_workspaces.reports.v2 import interface as panels

from lightning_dct.callbacks.wandb_runs import CONFIG_KEY, STEP
from lightning_dct.dashboard.contents import GROUPS, QUALITY, Bars, Curves, Panel, Rows, Trade, sections


def make_workspace(entity: str, project: str, name: str, quality: Sequence[str] = QUALITY) -> workspaces.Workspace:
    """The dashboard, not saved; the same arguments make the same one."""
    made = []
    for row, section in enumerate(sections(quality)):
        shown = [_make(panel) for panel in section.panels]
        for column, panel in enumerate(shown):
            # Random by default: then a file under version control would change in every line.
            panel._id = f"lightningdct{row}{column}"
        layout = workspaces.SectionLayoutSettings(columns=3, rows=-(-len(shown) // 3))
        made.append(workspaces.Section(name=section.name, panels=shown, is_open=True, layout_settings=layout))
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=made,
        settings=workspaces.WorkspaceSettings(x_axis=STEP),
        runset_settings=workspaces.RunsetSettings(
            groupby=[workspaces.Config(f"{CONFIG_KEY}.{setting}") for setting in GROUPS]
        ),
    )


def to_json(workspace: workspaces.Workspace) -> str:
    """A workspace as W&B stores it."""
    # Private: the package has no public way to a specification without sending it.
    view = workspace._to_model().model_dump(by_alias=True, exclude_none=True)
    stored = {key: view[key] for key in ("entity", "project", "displayName", "spec")}
    return json.dumps(stored, indent=2) + "\n"


class PushError(Exception):
    """The dashboard could not be saved; the message says why and what to do."""


def push(entity: str | None, project: str, name: str, quality: Sequence[str]) -> str:
    """Save the dashboard as a new view of a project, by default of the user's default entity; return the view's URL.

    Raises:
        PushError: No user is logged in, W&B cannot be reached, or there is no such project.
    """
    try:
        api = wandb.Api()
        owner = entity or api.default_entity
    except (AuthenticationError, UsageError) as error:
        raise PushError(
            f"cannot log in to W&B: {error} Run `wandb login`, or set WANDB_API_KEY, and WANDB_BASE_URL for your own"
            " server. `--output FILE` needs no login."
        ) from error
    if not owner:
        raise PushError("you have no default entity in W&B. Name the owner of the project: `--entity NAME`.")
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


def _make(panel: Panel) -> Any:
    match panel:
        case Curves():
            return panels.LinePlot(title=panel.title, x=STEP, y=list(panel.keys), log_y=panel.log_scale or None)
        case Trade():
            across, upwards = panels.SummaryMetric(panel.across), panels.SummaryMetric(panel.upwards)
            return panels.ScatterPlot(title=panel.title, x=across, y=upwards, log_x=True)
        case Bars():
            return panels.CustomChart(
                query={"summaryTable": {"tableKey": panel.table}},
                chart_name="wandb/bar/v0",
                chart_fields={"label": panel.label, "value": panel.value},
                chart_strings={"title": panel.title},
            )
        case Rows():
            return panels.WeavePanelSummaryTable(table_name=panel.table)
