"""What one start of torchrun shall do, written by the command for the ranks to read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """The same model under each synchronisation, in this order.

    Attributes:
        synchronisations: Names of :data:`benchmark.synchronisations.SYNCHRONISATIONS`, of
            :data:`benchmark.recommenders.RECOMMENDERS`, or of :data:`benchmark.stages.CROSSINGS`.
        warm_up_steps: Steps before measuring: buckets are rebuilt, thresholds selected, kernels compiled.
        steps: Most steps to measure.
        seconds: After which time a run should end that has not measured so many steps; None for never.
        score: Whether to tell the loss on held-out text at the end.
        batch_size: Rows a rank.
        width: Units of the model's hidden layers; of a recommender, entries a row.
        has_links: Whether each rank has a network interface of its own.
        folder: Where ranks leave their results.
        table_rows: Rows of each table of a recommender.
        micro_batches: Parts of a pipeline's batch.
        schedule: Of a pipeline.
    """

    synchronisations: list[str]
    warm_up_steps: int
    steps: int
    seconds: float | None
    score: bool
    batch_size: int
    width: int
    has_links: bool
    folder: str
    table_rows: int = 0
    micro_batches: int = 1
    schedule: str = ""

    def write(self) -> Path:
        """Write for the ranks to read."""
        file = Path(self.folder) / "job.json"
        file.write_text(json.dumps(asdict(self)))
        return file

    @staticmethod
    def read(file: Path) -> Job:
        """Read what :meth:`write` has written."""
        return Job(**json.loads(file.read_text()))
