"""Reads what W&B has written of an offline run, with W&B's own reader."""

import json
import subprocess
from functools import cached_property
from pathlib import Path
from typing import Any

from wandb.util import get_core_path


class OfflineRun:
    """The only run under ``folder``."""

    def __init__(self, folder: Path) -> None:
        (self.file,) = folder.glob("wandb/offline-run-*/run-*.wandb")

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """Everything, in the order in which it was written."""
        return [json.loads(line) for line in self._inspect("--json").splitlines()]

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """One dict a row; what is inside of media has keys with dots."""
        return [record["history"]["item"] for record in self.records if record["type"] == "history"]

    @cached_property
    def state(self) -> dict[str, Any]:
        """Among others ``config`` and ``summary``."""
        return json.loads(self._inspect("--summary", "--json"))

    def table(self, key: str) -> tuple[list[str], list[list[Any]]]:
        """Columns and rows of a table as it was logged last."""
        stored = json.loads(
            (self.file.parent / "files" / self.state["summary"][key]["path"]).read_text()
        )
        return stored["columns"], stored["data"]

    def _inspect(self, *options: str) -> str:
        # What `wandb leet inspect` starts.
        run = ["--run-file", str(self.file), str(self.file.parents[1])]
        command = [get_core_path(), "leet", "inspect", "--no-observability", *options, *run]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=600, check=True
        ).stdout
