"""Makes a workspace of the package wandb-workspaces from the dashboard's contents; nothing is sent anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from wandb_workspaces import workspaces
from wandb_workspaces.reports.v2 import interface as panels

from lightning_dct.callbacks.wandb_runs import CONFIG_KEY, STEP
from lightning_dct.dashboard.contents import GROUPS, QUALITY, Bars, Curves, Panel, Rows, Trade, sections


def make_workspace(entity: str, project: str, name: str, quality: Sequence[str] = QUALITY) -> workspaces.Workspace:
    """The dashboard, not saved yet; the same arguments make the same one.

    Args:
        entity: Whose project it is: a user or a team.
        project: Where the runs are.
        name: What the saved view is called.
        quality: See :func:`~lightning_dct.dashboard.contents.sections`.
    """
    made = []
    for row, section in enumerate(sections(quality)):
        shown = [_make(panel) for panel in section.panels]
        for column, panel in enumerate(shown):
            # They are drawn at random otherwise, and a file under version control would change in every line.
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
    """A workspace as W&B stores it: entity, project, display name and the specification of the view."""
    # A hack: the package has no public way to a workspace's specification that does not send it.
    view = workspace._to_model().model_dump(by_alias=True, exclude_none=True)
    stored = {key: view[key] for key in ("entity", "project", "displayName", "spec")}
    return json.dumps(stored, indent=2) + "\n"


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
