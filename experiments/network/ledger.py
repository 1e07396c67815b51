"""Records, for each part of a run, what the strategy counted and what this host's interface
sent.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_dct import ShardedEmbeddingBags
from network.hosts import HEADER_BYTES, sent_by_interface

SET_UP = "set-up"
STEPS = "steps"
OTHER = "other"


@dataclass(frozen=True)
class Sent:
    """Bytes that one rank has sent.

    ``gradients``, ``inside`` (the model) and ``evaluation`` (rows of sharded tables read outside
    training) are counted bytes. ``frames`` are bytes at the interface with all headers.
    """

    steps: int = 0
    gradients: int = 0
    inside: int = 0
    evaluation: int = 0
    frames: int = 0
    packets: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(self))
        )

    def __sub__(self, earlier: Sent) -> Sent:
        return Sent(
            *(getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self))
        )

    @property
    def counted(self) -> int:
        return self.gradients + self.inside + self.evaluation


class Ledger(Callback):
    """Divides a run into three parts, and writes what each of them sent to
    ``<folder>/rank<r>.json``.

    *set-up* lasts until the first ``skip`` steps are done. *steps* are the training steps after
    that. *other* is the rest: validation, checkpoints, means over the ranks at the end of an epoch,
    the scoring after training.
    """

    reads_weights = False

    def __init__(self, folder: str, skip: int = 5) -> None:
        self._folder = Path(folder)
        self._skip = skip
        self._parts = dict.fromkeys((SET_UP, STEPS, OTHER), Sent())
        self._part = SET_UP
        self._before = Sent()

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_index: int
    ) -> None:
        if trainer.global_step >= self._skip:
            self._enter(STEPS, trainer)

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._enter(OTHER, trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._enter(OTHER, trainer)

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        self._enter(OTHER, trainer)
        self._folder.mkdir(parents=True, exist_ok=True)
        parts = {name: asdict(sent) for name, sent in self._parts.items()}
        (self._folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(parts))

    @property
    def bytes_per_step(self) -> float | None:
        """Bytes that the interface has sent in a training step, without headers; None before there
        is one.
        """
        sent = self._parts[STEPS]
        return without_headers(sent) / sent.steps if sent.steps else None

    def _enter(self, part: str, trainer: Trainer) -> None:
        """Begin another part of the run, on all ranks at once."""
        if part == self._part and part == STEPS:
            return
        # Everything that was sent has arrived after the barrier.
        trainer.strategy.barrier()
        now = _sent_so_far(trainer)
        self._parts[self._part] += now - self._before
        self._before = now
        self._part = part


def without_headers(sent: Sent) -> int:
    """Bytes that an interface has sent, less the headers of the packets."""
    return sent.frames - HEADER_BYTES * sent.packets


def _sent_so_far(trainer: Trainer) -> Sent:
    traffic, inside = (
        getattr(trainer.strategy, name, None) for name in ("traffic", "split_traffic")
    )
    tables = [
        module
        for module in trainer.lightning_module.modules()
        if isinstance(module, ShardedEmbeddingBags)
    ]
    frames, packets = sent_by_interface()
    return Sent(
        trainer.global_step,
        traffic.totals.bytes_sent if traffic else 0,
        inside.totals.bytes_sent if inside else 0,
        sum(table.evaluation_traffic.totals.bytes_sent for table in tables),
        frames,
        packets,
    )


def read_ledgers(folder: Path, count: int) -> list[dict[str, Sent]]:
    """The ledgers by rank, then by part of the run; a FileNotFoundError if a rank has written
    none.
    """
    files = [folder / f"rank{rank}.json" for rank in range(count)]
    return [
        {name: Sent(**sent) for name, sent in json.loads(file.read_text()).items()}
        for file in files
    ]
