"""W&B: axes, summaries, settings, histograms and tables of a run, and a workspace of panels that
shows them.

Rank 0 logs the keys of ``docs/dashboards.md`` beside the scalars of every logger. The run's config
has the settings under ``lightning_dct``, by which runs can be grouped: the strategy's name, the
number of ranks and the fields of :class:`~lightning_dct.DCTConfig`. The workspace has every key
that :class:`~lightning_dct.CompressionMonitor` logs, and those of quality, which the user names.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import WandbLogger

from lightning_dct.config import DCTConfig, UsageError
from lightning_dct.sync.synchronizer import TensorFigures

CONFIG_KEY = "lightning_dct"
STEP = "trainer/global_step"  # the optimizer step, which Lightning's logger adds to every row
_OF_PARTS = {"density": "last,mean", "threshold": "last", "residual_norm": "last,max"}
SUMMARIES = {"dct/overhead_ms": "mean,max"}
SUMMARIES |= {
    f"dct/{part}/{key}": summary for part in ("dp", "mp") for key, summary in _OF_PARTS.items()
}
"""How W&B summarizes the history of a metric; for other metrics it shows the last value."""

QUALITY = ("train/loss", "val/loss")  # of the model, as the experiments of this repository log it
# Settings by which runs are grouped, outermost first.
GROUPS = ("strategy", "density", "value_format")
RATIO = "dct/compression_ratio"
RATIO_OF_RUN = "dct/run_compression_ratio"
TENSORS = "dct/dp/tensors"


def wandb_loggers(trainer: pl.Trainer) -> list[WandbLogger]:
    """The Trainer's loggers that write to W&B."""
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]


def describe_run(run: Any, settings: Mapping[str, Any]) -> None:
    """Give a ``wandb.Run`` the axis and summaries of our metrics, and the settings."""
    run.define_metric(STEP)
    # Lightning does so for all metrics, but only in runs that it has started.
    run.define_metric("dct/*", step_metric=STEP, step_sync=True)
    for key, summary in SUMMARIES.items():
        run.define_metric(key, step_metric=STEP, step_sync=True, summary=summary)
    run.config.update({CONFIG_KEY: dict(settings)}, allow_val_change=True)


def settings_of(trainer: pl.Trainer) -> dict[str, Any]:
    """The current settings of synchronisation: plain numbers, strings and dicts."""
    strategy = trainer.strategy
    settings = {
        "strategy": getattr(strategy, "strategy_name", type(strategy).__name__),
        "ranks": trainer.world_size,
    }
    config = getattr(getattr(strategy, "synchronizer", None) or strategy, "config", None)
    if isinstance(config, DCTConfig):  # DeepSpeed has another `config`
        settings |= vars(config)
    pipeline = ("stages", "micro_batches", "schedule")
    return settings | {
        name: getattr(strategy, name) for name in pipeline if hasattr(strategy, name)
    }


def tensor_media(
    figures: Sequence[TensorFigures], thresholds_inside: Iterable[float]
) -> dict[str, Any]:
    """Histograms over the synchronised tensors and the thresholds inside the model, and a table of
    the tensors.
    """
    import wandb

    media: dict[str, Any] = {}
    histograms: dict[str, Iterable[float | None]] = {
        "dct/dp/log10_density": [figure.density for figure in figures],
        "dct/dp/log10_threshold": [figure.threshold for figure in figures],
        "dct/dp/log10_residual_norm": [figure.residual_norm for figure in figures],
        "dct/mp/log10_threshold": thresholds_inside,
    }
    for key, values in histograms.items():
        if logarithms := [math.log10(value) for value in values if value]:
            media[key] = wandb.Histogram(logarithms)
    if figures:
        columns: list[str | int] = ["tensor", "entries", "density", "threshold", "residual_norm"]
        media[TENSORS] = wandb.Table(columns=columns, data=[list(figure) for figure in figures])
    return media


def summary_media(tables: Mapping[str, Iterable[tuple[str, str]]]) -> dict[str, Any]:
    """The tables printed at the end of fit, by title, as one."""
    import wandb

    rows = [[title, name, value] for title, table in tables.items() for name, value in table]
    return {"dct/summary": wandb.Table(columns=["table", "figure", "value"], data=rows)}


def sections(quality: Sequence[str] = QUALITY) -> dict[str, list[Any]]:
    """All panels by section; each key of quality gets one, and the last key also against the
    ratio.
    """
    from wandb_workspaces.reports.v2 import interface as panels

    def curves(title: str, *keys: str, log: bool = False) -> Any:
        return panels.LinePlot(title=title, x=STEP, y=list(keys), log_y=log or None)

    def against_ratio(key: str) -> Any:
        across, upwards = map(panels.SummaryMetric, (RATIO_OF_RUN, key))
        return panels.ScatterPlot(
            title=f"{key} against compression ratio", x=across, y=upwards, log_x=True
        )

    def bars(title: str, column: str) -> Any:
        return panels.CustomChart(
            query={"summaryTable": {"tableKey": TENSORS}},
            chart_name="wandb/bar/v0",
            chart_fields={"label": "tensor", "value": column},
            chart_strings={"title": title},
        )

    return {
        "Quality": [*(curves(key, key) for key in quality), *map(against_ratio, quality[-1:])],
        "Bytes": [
            curves("data parallelism: bytes sent, rank 0", "dct/dp/bytes_sent"),
            curves(
                "data parallelism: sent, and dense fp32",
                "dct/dp/bytes_sent",
                "dct/dp/bytes_dense",
                log=True,
            ),
            panels.WeavePanelSummaryTable(table_name="dct/summary"),
        ],
        "Compression ratio": [
            curves("all traffic, against dense fp32", RATIO, log=True),
            curves("all traffic of the run so far, against dense fp32", RATIO_OF_RUN, log=True),
            curves("data parallelism, against dense fp32", "dct/dp/compression_ratio", log=True),
        ],
        "Thresholds and densities per tensor": [
            curves("threshold, median of all tensors", "dct/dp/threshold", log=True),
            curves("thresholds of all tensors, log10", "dct/dp/log10_threshold"),
            bars("threshold", "threshold"),
            curves("density: entries sent over entries due", "dct/dp/density"),
            curves("densities of all tensors, log10", "dct/dp/log10_density"),
            bars("density", "density"),
            panels.WeavePanelSummaryTable(table_name=TENSORS),
        ],
        "Residual norms": [
            curves("norm over all tensors, rank 0", "dct/dp/residual_norm"),
            curves("norms of all tensors, log10", "dct/dp/log10_residual_norm"),
            bars("residual norm", "residual_norm"),
        ],
        "Time": [
            curves("compressing, ms a step", "dct/overhead_ms"),
            curves("seconds of training, without validations", "dct/seconds"),
        ],
        "Split points": [
            curves("compression ratio, against dense fp32", "dct/mp/compression_ratio", log=True),
            curves(
                "bytes sent, and dense fp32", "dct/mp/bytes_sent", "dct/mp/bytes_dense", log=True
            ),
            curves("density: entries sent over entries due", "dct/mp/density"),
            curves("threshold, median", "dct/mp/threshold", log=True),
            curves("all thresholds, log10", "dct/mp/log10_threshold"),
            curves("norm of the residual, rank 0", "dct/mp/residual_norm"),
            curves("forwards with more entries than a payload holds", "dct/mp/overflows"),
        ],
    }


def make_workspace(entity: str, project: str, name: str, quality: Sequence[str] = QUALITY) -> Any:
    """The dashboard as a workspace of ``wandb-workspaces``, not saved; the same arguments make the
    same one.
    """
    from wandb_workspaces import workspaces

    made = []
    for row, (title, shown) in enumerate(sections(quality).items()):
        for column, panel in enumerate(shown):
            # A random id, the default, would change a file under version control in every line.
            panel._id = f"lightningdct{row}{column}"
        layout = workspaces.SectionLayoutSettings(columns=3, rows=-(-len(shown) // 3))
        made.append(
            workspaces.Section(name=title, panels=shown, is_open=True, layout_settings=layout)
        )
    groups: list[Any] = [workspaces.Config(f"{CONFIG_KEY}.{setting}") for setting in GROUPS]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=made,
        settings=workspaces.WorkspaceSettings(x_axis=STEP),
        runset_settings=workspaces.RunsetSettings(groupby=groups),
    )


def to_json(workspace: Any) -> str:
    """A workspace as W&B stores it."""
    # Private, because the public way to a specification sends it.
    view = workspace._to_model().model_dump(by_alias=True, exclude_none=True)
    stored = {key: view[key] for key in ("entity", "project", "displayName", "spec")}
    return json.dumps(stored, indent=2) + "\n"


def push(entity: str | None, project: str, name: str, quality: Sequence[str]) -> str:
    """Save the dashboard as a new view of a project, by default of the user's default entity;
    return the view's URL.

    A UsageError says that no user is logged in, that W&B cannot be reached, or that there is no
    such project.
    """
    import wandb
    from wandb.errors import AuthenticationError, CommError
    from wandb.errors import UsageError as WandbUsageError

    try:
        api = wandb.Api()
        owner = entity or api.default_entity
    except (AuthenticationError, WandbUsageError) as error:
        raise UsageError(
            f"cannot log in to W&B: {error} Run `wandb login`, or set WANDB_API_KEY, and"
            " WANDB_BASE_URL for your own server. `--output FILE` needs no login."
        ) from error
    if not owner:
        raise UsageError(
            "you have no default entity in W&B. Name the owner of the project: `--entity NAME`."
        )
    workspace = make_workspace(owner, project, name, quality)
    try:
        # Any attribute makes W&B look the project up.
        _ = api.project(project, owner).id
        url: str = workspace.save().url
    except (CommError, ValueError) as error:
        raise UsageError(
            f"W&B has no project {project!r} of the entity {owner!r}, or you may not write to it"
            f" ({error}). Check `--project` and `--entity`, or log a run there first:"
            f" `WandbLogger(project={project!r})`."
        ) from error
    return url
