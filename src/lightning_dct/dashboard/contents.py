"""What the dashboard shows: sections, their panels, and the keys in each; plain data, without W&B.

:class:`~lightning_dct.CompressionMonitor` logs every key here except those of quality, which the user names. A test
compares them with a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

QUALITY = ("train/loss", "val/loss")
"""Keys of the model's quality, as the experiments of this repository log them."""
GROUPS = ("strategy", "density", "value_format")
"""Settings by which runs are grouped, outermost first."""


@dataclass(frozen=True)
class Curves:
    """Scalars against the optimizer step; the key of a histogram shows as a strip of histograms."""

    title: str
    keys: tuple[str, ...]
    log_scale: bool = False


@dataclass(frozen=True)
class Trade:
    """One point for each run: two keys of its summary, the horizontal one on a logarithmic axis."""

    title: str
    across: str
    upwards: str


@dataclass(frozen=True)
class Bars:
    """A bar for each row of the last logged table, with a column of names and a column of lengths."""

    title: str
    table: str
    label: str
    value: str


@dataclass(frozen=True)
class Rows:
    """The last logged table of a key."""

    table: str


Panel = Curves | Trade | Bars | Rows


@dataclass(frozen=True)
class Section:
    """A heading, and the panels below it."""

    name: str
    panels: tuple[Panel, ...]


def sections(quality: Sequence[str] = QUALITY) -> list[Section]:
    """All sections, from top to bottom.

    Args:
        quality: Keys of the model's quality. Each gets a panel; the last one is also drawn against the ratio.
    """
    ratio, tensors = "dct/compression_ratio", "dct/dp/tensors"
    return [
        Section(
            "Quality",
            (
                *(Curves(key, (key,)) for key in quality),
                *(Trade(f"{key} against compression ratio", f"{ratio}.mean", key) for key in quality[-1:]),
            ),
        ),
        Section(
            "Bytes",
            (
                Curves("data parallelism: bytes sent, rank 0", ("dct/dp/bytes_sent",)),
                Curves(
                    "data parallelism: sent, and dense fp32",
                    ("dct/dp/bytes_sent", "dct/dp/bytes_dense"),
                    log_scale=True,
                ),
                Rows("dct/summary"),
            ),
        ),
        Section(
            "Compression ratio",
            (
                Curves("all traffic, against dense fp32", (ratio,), log_scale=True),
                Curves("data parallelism, against dense fp32", ("dct/dp/compression_ratio",), log_scale=True),
            ),
        ),
        Section(
            "Thresholds and densities per tensor",
            (
                Curves("threshold, median of all tensors", ("dct/dp/threshold",), log_scale=True),
                Curves("thresholds of all tensors, log10", ("dct/dp/log10_threshold",)),
                Bars("threshold", tensors, "tensor", "threshold"),
                Curves("density: entries sent over entries due", ("dct/dp/density",)),
                Curves("densities of all tensors, log10", ("dct/dp/log10_density",)),
                Bars("density", tensors, "tensor", "density"),
                Rows(tensors),
            ),
        ),
        Section(
            "Residual norms",
            (
                Curves("norm over all tensors, rank 0", ("dct/dp/residual_norm",)),
                Curves("norms of all tensors, log10", ("dct/dp/log10_residual_norm",)),
                Bars("residual norm", tensors, "tensor", "residual_norm"),
            ),
        ),
        Section("Compression time", (Curves("ms a step", ("dct/overhead_ms",)),)),
        Section(
            "Split points",
            (
                Curves("compression ratio, against dense fp32", ("dct/mp/compression_ratio",), log_scale=True),
                Curves("bytes sent, and dense fp32", ("dct/mp/bytes_sent", "dct/mp/bytes_dense"), log_scale=True),
                Curves("density: entries sent over entries due", ("dct/mp/density",)),
                Curves("threshold, median", ("dct/mp/threshold",), log_scale=True),
                Curves("all thresholds, log10", ("dct/mp/log10_threshold",)),
                Curves("norm of the residual, rank 0", ("dct/mp/residual_norm",)),
                Curves("forwards with more entries than a payload holds", ("dct/mp/overflows",)),
            ),
        ),
    ]
