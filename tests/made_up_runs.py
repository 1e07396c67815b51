"""Logs of made-up runs, whose every figure a test can compute."""

import csv
from pathlib import Path
from typing import Any

BYTES_PER_STEP = 1_000


def write_csv(folder: Path, rows: list[dict[str, Any]], hparams: str = "") -> Path:
    """Write ``metrics.csv`` as Lightning does, and ``hparams.yaml``; returns the folder."""
    folder.mkdir(parents=True)
    names = sorted({name for row in rows for name in row})
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    (folder / "hparams.yaml").write_text(hparams)
    return folder


def rows_of(ratio: float | None, steps: int = 60, every: int = 10, inside: bool = False) -> list[dict[str, Any]]:
    """Rows of a run that takes 0.5 s and sends 1,000 bytes a step, or, with no ratio, of one that counts none.

    Its training loss is 4 - step / 20, its validation loss 5 - step / 20, its test loss 1.5.
    """
    rows: list[dict[str, Any]] = []
    for step in range(every - 1, steps, every):
        rows.append({"step": step, "train/loss": 4 - step / 20})
        if ratio is not None:
            sent = BYTES_PER_STEP * (step + 1)
            rows.append(
                {"step": step, "dct/compression_ratio": ratio, "dct/overhead_ms": 2.0, **_part("dp", sent, ratio)}
            )
            rows[-1]["dct/seconds"] = 0.5 * (step + 1)
            if inside:
                rows[-1] |= _part("mp", sent, ratio)
        if (step + 1) % (2 * every) == 0:
            rows.append({"step": step, "val/loss": 5 - step / 20})
    return [*rows, {"step": steps, "test/loss": 1.5}]


def _part(part: str, sent: int, ratio: float) -> dict[str, float]:
    figures = {
        "bytes_sent": sent, "bytes_dense": sent * ratio, "compression_ratio": ratio, "density": 0.03,
        "threshold": 0.5, "residual_norm": 7.0,
    }  # fmt: skip
    return {f"dct/{part}/{name}": value for name, value in figures.items()}


def write_train_run(folder: Path, rows: list[dict[str, Any]], overrides: list[str]) -> Path:
    """Write what ``experiments/train.py`` leaves."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(
        f"strategy:\n  _target_: lightning_dct.DCTStrategy\n  density: {overrides[0].partition('=')[2]}\n"
        "seed: 0\npaths:\n  output_dir: somewhere\n"
    )
    (folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {word}\n" for word in overrides))
    write_csv(folder / "csv", rows, "width: 128\n")
    return folder
