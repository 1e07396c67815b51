"""A run's ``result.json`` without the run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser


def made_up(
    overrides: list[str] | None = None,
    seed: int = 0,
    sent: float = 1000.0,
    rows: float | None = None,
    **metrics: float | None,
) -> dict:
    """A ``result.json`` with the metrics for both parts, those of the test part a thousandth
    higher.

    ``sent`` are the bytes of a step, ``rows`` those inside a split model.
    """
    parts = {"val": 0.0, "test": 0.001}
    return {
        "choices": {"strategy": "dct"},
        "overrides": overrides or [],
        "seed": seed,
        "world_size": 2,
        "steps": 4,
        "metrics": {
            f"{part}/{name}": None if value is None else value + more
            for part, more in parts.items()
            for name, value in metrics.items()
        },
        "best_known": {},
        "compression_ratio": 8000 / sent if sent else None,
        "bytes_sent_per_step": sent,
        "bytes_dense_per_step": 8000.0,
        "split_ratio": None,
        "split_bytes_per_step": rows,
        "split_bytes_dense_per_step": rows and 40 * rows,
        "milliseconds_per_step": 10.0,
        "milliseconds_compressing": 2.0,
        "milliseconds_waiting": 1.0,
        "tensor_bytes": 16000,
        "interface_bytes_per_step": None,
        "their_ratio": None,
        "history": [
            {
                "step": 4,
                "seconds": 0.04,
                "metrics": {f"val/{name}": value for name, value in metrics.items()},
            }
        ],
        "trainable_parameters": 1000,
    }


def run_in_no_time(
    started: list[str], figures: Callable[[dict[str, str]], dict[str, Any] | None]
) -> Any:
    """Stands in for ``run_alone``: leaves a result with the figures for the settings of a run, or
    fails without any.

    ``started`` gets the name of each run's folder.
    """

    def start(command: list[str], output: Any) -> int:
        words = command[
            1 + max(place for place, word in enumerate(command) if word.endswith(".py")) :
        ]
        overrides = OverridesParser.create().parse_overrides(words)
        settings = {override.key_or_group: str(override.value()) for override in overrides}
        folder = Path(settings["hydra.run.dir"])
        started.append(folder.name)
        if (found := figures(settings)) is None:
            output.write("a line of what went wrong\n")
            return 1
        result = made_up(words[:-1], int(settings["seed"]), **found)
        (folder / "result.json").write_text(json.dumps(result))
        return 0

    return start
