"""The exchanges of tables that the recommender's benchmark compares, on one DLRM, and its
clicks.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import chain
from time import process_time
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional

from benchmark.dense_tables import DenseTables, TorchRecTables
from benchmark.job import Job
from dlrm.data import FIRST_ROW, NUM_DENSE, ClickTeacher
from dlrm.model import DLRM
from lightning_dct import DCTStrategy, RowWiseAdagrad, ShardedEmbeddingBags
from rivals.hooks import CountedDDPStrategy
from streams import Batch, TrainingStream, rank_rows

REPLICATED = "tables on every rank, DDP"
DENSE = "all-to-all, fp32 rows"
NUM_TABLES = 26
ZIPF_EXPONENT = 1.1
LEARNING_RATE = 0.03
BOTTOM = (256, 128)
TOP = (256, 128)
# What a step sends.
MESSAGES = ("ids", "rows", "evicted", "gradients")
# Caches fill in these steps: look-ups of rows that no rank has seen would distort the times.
FILLING_STEPS = 40


def replicated(table_rows: list[int], dim: int) -> nn.Module:
    """Whole tables with sparse gradients."""
    return nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum", sparse=True) for rows in table_rows)


def _peer(make: Callable[[list[int], int], nn.Module]) -> Any:
    # Every rank starts from the same seed: sending tables of gigabytes over a slow link would only
    # take time.
    return lambda: CountedDDPStrategy("fp32", init_sync=False), make, 0


def _ours(strategy: dict[str, Any], **settings: Any) -> Any:
    return lambda: DCTStrategy(**strategy), partial(ShardedEmbeddingBags, **settings), FILLING_STEPS


_GRADIENTS = {"compress": "gradients", "density": 0.03, "min_tensor_size": 1}
Recommender = tuple[Callable[[], DDPStrategy], Callable[[list[int], int], nn.Module], int]
RECOMMENDERS: dict[str, Recommender] = {
    REPLICATED: _peer(replicated),
    DENSE: _peer(partial(DenseTables, row_format="fp32")),
    "all-to-all, fp16 rows": _peer(partial(DenseTables, row_format="fp16")),
    "all-to-all, int8 rows": _peer(partial(DenseTables, row_format="int8")),
    "all-to-all, 4-bit rows": _peer(partial(DenseTables, row_format="int4")),
    **(
        {
            f"TorchRec, {name} rows": _peer(partial(TorchRecTables, row_format=name))
            for name in ("fp32", "fp16", "bf16", "int8")
        }
        if find_spec("torchrec") and find_spec("fbgemm_gpu")
        else {}
    ),
    "changes, 5%, 1 bit": _ours(_GRADIENTS),
    "changes, 1%, 1 bit": _ours(_GRADIENTS, density=0.01),
}
"""A strategy, tables, and steps that pass before the warm-up."""


class ClickSteps(LightningModule):
    """The whole step of a DLRM; ``make_tables`` takes the rows of each table and the dimension."""

    def __init__(self, make_tables: Callable[[list[int], int], nn.Module], job: Job) -> None:
        super().__init__()
        table_rows = [job.table_rows] * NUM_TABLES
        self.network = DLRM(NUM_DENSE, table_rows, job.width, BOTTOM, TOP, exchange={})
        self.network.tables = make_tables(table_rows, job.width)
        self._sent = dict.fromkeys(MESSAGES, 0.0)

    def configure_model(self) -> None:
        """Make the rows of this rank, and count what every message of a step takes."""
        tables: Any = self.network.tables
        if hasattr(tables, "materialize"):
            tables.materialize()
            prefix = "network.tables."
            self._ddp_params_and_buffers_to_ignore = [
                prefix + name for name, _ in tables.named_parameters()
            ]
        if isinstance(tables, ShardedEmbeddingBags):
            exchange = tables.exchange_group
            start = exchange.start

            def counted(
                payloads: dict[int, Tensor | list[Tensor]],
                sizes: dict[int, int],
                traffic: Any,
                name: str,
            ) -> Any:
                number = 0
                for peer, payload in payloads.items():
                    parts = [payload] if isinstance(payload, Tensor) else payload
                    if peer != exchange.rank:
                        number += sum(part.numel() for part in parts)
                # The residuals of evicted rows travel with gradients.
                waiting = tables.evicted if name == "gradients" else []
                residuals = [part for one in waiting for part in chain(*one.sent.values())]
                evicted = sum(part.numel() for part in residuals)
                self._sent["evicted"] += evicted
                self._sent[name] += number - evicted
                return start(payloads, sizes, traffic, name)

            exchange.start = counted  # type: ignore[method-assign]

    def measured(self) -> dict[str, float]:
        traffic = getattr(self.network.tables, "traffic", None)
        exchanging = traffic.totals.seconds if traffic else 0.0
        return {**self._sent, "exchange_seconds": exchanging, "cpu_seconds": process_time()}

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        logits = self.network(batch["dense"], batch["categorical"])
        return functional.binary_cross_entropy_with_logits(logits, batch["label"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Row-wise Adagrad of what is synchronised; TorchRec steps its tables itself."""
        own = (
            set(self.network.tables.parameters())
            if isinstance(self.network.tables, TorchRecTables)
            else set()
        )
        return RowWiseAdagrad([p for p in self.parameters() if p not in own], lr=LEARNING_RATE)


def click_batches(job: Job, steps: int, rank: int, world_size: int) -> TrainingStream:
    """A batch for each step, made beforehand, so that making them is not timed."""
    teacher = ClickTeacher(
        [job.table_rows] * NUM_TABLES, zipf_exponent=ZIPF_EXPONENT, missing_rate=0.0
    )
    batches = []
    for step in range(steps):
        rows = (
            rank_rows(step, batch_size=job.batch_size, rank=rank, world_size=world_size)
            + FIRST_ROW["train"]
        )
        batches.append(teacher.batch(rows))
    return TrainingStream(batches.__getitem__, steps)
