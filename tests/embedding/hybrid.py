"""A small hybrid-parallel model: sharded tables below, a replicated network on top."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from distributed.training import trainer_for, warnings_of
from embedding.training import generator
from lightning_dct import DCTStrategy, RowWiseAdagrad, ShardedEmbeddingBags

TABLE_ROWS = [30, 4, 300, 1, 11]
DIM = 4
GLOBAL_BATCH = 12

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "row-wise adagrad": RowWiseAdagrad,
}
EVERYTHING = {"density": 1.0, "value_format": "fp32"}
# The replicated weights as under DistributedDataParallel, whatever the number of ranks.
ALL_GRADIENTS = {"compress": "gradients", **EVERYTHING}


class Hybrid(LightningModule):
    dim = DIM

    def __init__(
        self, exchange: dict[str, Any], optimizer: str = "sgd", learning_rate: float = 0.2
    ) -> None:
        super().__init__()
        self.tables = ShardedEmbeddingBags(TABLE_ROWS, self.dim, seed=5, **exchange)
        with torch.random.fork_rng():
            torch.manual_seed(9)
            self.top = nn.Sequential(
                nn.Linear(len(TABLE_ROWS) * self.dim, 8), nn.Tanh(), nn.Linear(8, 1)
            )
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.unused_dense: list[bool] = []

    def slots(self) -> dict[str, int]:
        """The slot of each of this rank's rows, by table and row."""
        ranges = self.tables.placement.ranges(self.tables.exchange_group.rank)
        return {
            f"{table}.{row}": place + row - start
            for table, start, stop, place in ranges
            for row in range(start, stop)
        }

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.tables(ids).flatten(1)).squeeze(1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val", (self(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sparse adam":
            tables = torch.optim.SparseAdam([self.tables.weight], lr=self.learning_rate)
            return [tables, torch.optim.SGD(self.top.parameters(), lr=self.learning_rate)]
        return OPTIMIZERS[self.optimizer](self.parameters(), lr=self.learning_rate)


class Batches(IterableDataset):
    """Global batch ``j`` is the same whatever the number of ranks."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.batch(index) for index in range(self.number))

    def __len__(self) -> int:
        return self.number

    @staticmethod
    def batch(index: int) -> tuple[Tensor, Tensor]:
        rank = int(os.environ["RANK"])
        world_size = int(os.environ["WORLD_SIZE"])
        draws = torch.rand(GLOBAL_BATCH, len(TABLE_ROWS), generator=generator(index, 7))
        ids = (draws**2 * torch.tensor(TABLE_ROWS)).long()
        share = slice(GLOBAL_BATCH * rank // world_size, GLOBAL_BATCH * (rank + 1) // world_size)
        return ids[share], (ids[share].sum(dim=1) % 3).float()


def batches(number: int) -> DataLoader:
    return DataLoader(Batches(number), batch_size=None)


def whole(module: Hybrid) -> dict[str, Tensor]:
    """This rank's rows and their optimizer states by table and row, and the replicated weights by
    name.
    """
    weight = module.tables.weight
    found = {name: value.detach().clone() for name, value in module.top.named_parameters()}
    optimizers = [] if module._trainer is None else module.trainer.optimizers
    states = [optimizer.state.get(weight, {}).get("sum") for optimizer in optimizers]
    for name, slot in module.slots().items():
        found[name] = weight[slot].detach().clone()
        found |= {f"{name} sum": state[slot].clone() for state in states if state is not None}
    return found


def together(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What all ranks have, replicated weights from the last."""
    return {name: value for part in parts for name, value in part.items()}


def train(
    number: int, exchange: dict[str, Any], optimizer: str = "sgd", **settings: Any
) -> dict[str, Tensor]:
    """Train, save when told where, and give this rank's weights."""
    module = Hybrid(exchange, optimizer)
    fit(module, number, **settings)
    return whole(module)


def fit(
    module: Hybrid,
    number: int,
    ckpt_path: str | None = None,
    save_to: str | None = None,
    strategy: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Train, and save when told where."""
    trainer = trainer_for(DCTStrategy(**{**ALL_GRADIENTS, **(strategy or {})}), **settings)
    trainer.fit(module, batches(number), ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)


def halves(save: Path | None, load: Path | None) -> dict[str, Any]:
    """Two epochs, or the first of them if it saves, or the second if it loads."""
    if save is not None:
        return {"save_to": str(save)}
    return {"max_epochs": 2, "ckpt_path": None if load is None else str(load)}


def load(path: str) -> dict[str, Tensor]:
    """Load a checkpoint by validating it; this rank's weights."""
    module = Hybrid({"density": 0.2})
    trainer_for(DCTStrategy(**ALL_GRADIENTS)).validate(
        module, batches(1), ckpt_path=path, verbose=False
    )
    return whole(module)


def resume(
    path: str, make: Callable[..., Hybrid], exchange: dict[str, Any]
) -> tuple[dict[str, Tensor], list[str]]:
    """Train on from a checkpoint; what this rank has at the start, and the warnings."""
    module = make(exchange, "adagrad")
    seen = []
    module.on_train_start = lambda: seen.append(whole(module))
    said = warnings_of(fit, module, 4, path, max_epochs=2)
    return seen[0], [one for one in said if "max_rows" in one]


def files_in(folder: str) -> list[str]:
    return sorted(
        str(file.relative_to(folder)) for file in Path(folder).rglob("*") if file.is_file()
    )


def residuals_then(
    make: Callable[..., Hybrid], exchange: dict[str, Any], path: str
) -> dict[tuple[int, int], Tensor]:
    """Train a little, save, and give what this rank's residuals are by table and row."""
    module = make(exchange)
    fit(module, 5, save_to=path)
    tables = module.tables
    found = {}
    held = tables.own_copies
    for owner in held.codes:
        places, slots = held.cache.contents(owner)
        for table, row, slot in zip(*tables.placement.rows_of(owner, places), slots, strict=True):
            found[int(table), int(row)] = held.residual[slot].clone()
    return found


def collected_after(
    make: Callable[..., Hybrid], exchange: dict[str, Any], path: str
) -> dict[tuple[int, int], Tensor]:
    """Resume, and give the gradients that this rank has collected by table and row."""
    module = make(exchange)
    seen: dict = {}

    def look(*_: Any) -> None:
        tables = module.tables
        rank = module.tables.exchange_group.rank
        for places, gradient in tables.collected.parts:
            # All of them have rows.
            assert tables.resolve(places, gradient)[0].numel() == places.numel()
            for table, row, values in zip(
                *tables.placement.rows_of(rank, places.cpu().numpy()), gradient, strict=True
            ):
                seen[int(table), int(row)] = seen.get((int(table), int(row)), 0) + values.double()

    module.on_train_start = look
    fit(module, 5, path, max_epochs=2)
    return seen


def assert_residuals_are_conserved(
    ranks: Any, folder: Path, world_size: int, make: Callable[..., Hybrid], exchange: dict[str, Any]
) -> None:
    """The mean residual of two ranks is collected by the owners when other ranks resume."""
    path = str(folder / "x.ckpt")
    given: dict = {}
    for part in ranks(2).run(residuals_then, make, exchange, path):
        for key, values in part.items():
            given[key] = given.get(key, 0) + values.double() / 2
    found: dict = {}
    for part in ranks(world_size).run(collected_after, make, exchange, path):
        for key, values in part.items():
            found[key] = found.get(key, 0) + values / world_size
    assert any(float(values.abs().max()) > 0 for values in given.values())
    assert given.keys() == found.keys()
    for key, values in given.items():
        torch.testing.assert_close(found[key], values, rtol=1e-6, atol=1e-12)
