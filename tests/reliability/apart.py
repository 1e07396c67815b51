"""Trainings whose ranks do not do the same: ordinary mistakes, each on one rank only."""

import os
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import LearningRateFinder
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dct.fabric  # noqa: F401
from distributed.training import trainer_for
from lightning_dct import (
    DCTFSDPStrategy,
    DCTPipelineStrategy,
    DCTStrategy,
    ShardedEmbeddingBags,
    SplitPoint,
    SplitSequential,
    Updates,
)
from lightning_dct.callbacks import internal
from lightning_dct.failures import collective_order, lifeline


class Model(pl.LightningModule):
    """Two linear layers around a BatchNorm, whose running statistics are averaged at the end, and
    one beside them.

    Or two around a split point, each of which is a stage of a pipeline.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        norm = (
            []
            if any(words in way for words in ("checkpoint", "no buffers", "only one"))
            else [nn.BatchNorm1d(8)]
        )
        self.model = nn.Sequential(nn.Linear(8, 8), *norm, nn.Linear(8, 8))
        self.extra = nn.Linear(8, 8)
        self.way = way
        self.lr = 0.1
        if way == "unfreeze":
            self.extra.requires_grad_(False)
        if way.startswith("stage"):
            self.model = SplitSequential(nn.Linear(8, 8), SplitPoint(), nn.Linear(8, 8))
            self.extra = None
        self.tables = ShardedEmbeddingBags([9], 4) if way.startswith("rows") else None
        self.others = ShardedEmbeddingBags([9], 4, seed=1) if "other order" in way else None

    @property
    def automatic_optimization(self) -> bool:
        return self.way not in ("fewer steps of one", "rows, not looked up")

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor | None:
        if "not looked up" in self.way:
            if self.global_rank != 0 or batch_idx != 4:
                self.manual_backward(self.tables(torch.ones(4, 1, dtype=torch.int64)).mean())
            self.optimizers().step()
            return None
        if not self.automatic_optimization:
            for number, optimizer in enumerate(self.optimizers()):
                self.manual_backward(
                    (self.model[-1](batch[0]) + self.extra(batch[0])).square().mean()
                )
                if self.global_rank != 0 or batch_idx != 3 or number != 1:
                    optimizer.step()
                    optimizer.zero_grad()
            return None
        if self.global_rank == 0 and batch_idx == 4:
            if "stop" in self.way:
                self.trainer.should_stop = True
            if "search" in self.way:
                raise KeyError("an error of rank 0 alone")
            if self.way == "barrier of its own":
                dist.barrier()
            if self.way == "more parameters":
                self.optimizers().add_param_group({"params": list(self.extra.parameters())})
            if "gathering" in self.way and "after" not in self.way and "end" not in self.way:
                self.all_gather(batch[0])
        output = self.model(batch[0])
        loss = (output if self.extra is None else output + self.extra(batch[0])).square().mean()
        ids = torch.ones(4, 1, dtype=torch.int64)
        is_apart = self.global_rank == 0 and batch_idx == 4
        if is_apart and "exact" in self.way:
            with torch.no_grad():
                self.tables(ids)
        tables = [one for one in (self.tables, self.others) if one is not None]
        for one in tables[::-1] if is_apart else tables:
            loss = loss + one(ids).mean()
        if self.global_rank == 0 and batch_idx == 4 and "after forward" in self.way:
            self.all_gather(batch[0])
        if "log" in self.way:
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            if "once more" in self.way and self.global_rank == 0 and batch_idx == 4:
                self.log("more", loss, on_step=True, sync_dist=True)
        return loss

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if self.way.startswith("skips") and self.global_rank == 0 and batch_idx == 5:
            optimizer_closure()  # its gradients are too large
            return
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0 and batch_idx == 4 and self.way == "unfreeze":
            self.extra.requires_grad_(True)
        if self.global_rank == 0 and batch_idx == 4 and self.way.endswith("save"):
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/x.ckpt")
        if self.global_rank == 0 and batch_idx == 4 and "decide" in self.way:
            self.trainer.strategy.reduce_boolean_decision(True)

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0 and "looked up alone" in self.way:
            with torch.no_grad():
                self.tables(torch.ones(4, 1, dtype=torch.int64))

    def on_train_end(self) -> None:
        if self.global_rank == 0 and "gathering at the end" in self.way:
            self.all_gather(torch.ones(1))
        if self.global_rank == 0 and "save at the end" in self.way:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/x.ckpt")

    def on_after_backward(self) -> None:
        if self.global_rank == 0 and self.trainer.global_step == 4 and "after backward" in self.way:
            self.all_gather(torch.ones(1))

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("validation", self.model(batch[0]).mean())
        if self.global_rank == 0 and batch_idx == 4 and "log_dir" in self.way:
            self.trainer.log_dir  # noqa: B018
        if self.global_rank == 0 and batch_idx == 4 and "barrier" in self.way:
            dist.barrier()

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        if "once more" in self.way or (self.global_rank == 0 and batch_idx == 4):
            self.all_gather(batch[0])
        if self.global_rank == 0 and batch_idx == 4:
            self.all_gather(batch[0])

    predict_step = test_step

    def configure_optimizers(self) -> Any:
        if self.way == "fewer steps of one":
            return [torch.optim.SGD(one.parameters(), 0.1) for one in (self.model[-1], self.extra)]
        chosen = (
            self
            if self.way.startswith(("unfreeze", "stage", "shard", "rows", "barrier"))
            else self.model
        )
        return torch.optim.SGD(chosen.parameters(), 0.1)


def loop(way: str) -> None:
    """Train without a Trainer; rank 0 makes the mistake."""
    is_first = os.environ["RANK"] == "0"
    fabric = None
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if way.startswith("fabric"):
        fabric = Fabric(strategy="dct", accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]))
        fabric.launch()
        model = nn.Sequential(model, nn.Linear(8, 8))
        others = torch.optim.SGD(model[1].parameters(), 0.1)
        model, optimizer, others = fabric.setup(model, optimizer, others)
        evaluation = fabric.strategy.shared_weights
    else:
        dist.init_process_group("gloo")
        evaluation = Updates(model, optimizer).shared_weights
    for step in range(12):
        is_apart = is_first and step == 9
        if is_apart and "fewer batches" in way:
            break
        model(torch.randn(4, 8)).square().mean().backward()
        if is_apart and fabric is not None and "optimizer" not in way:
            fabric.barrier() if "barrier" in way else fabric.all_gather(torch.ones(1))
        if is_apart and "evaluation" in way:
            with evaluation():
                pass
        if not (is_apart and "fewer steps" in way):
            optimizer.step()
        if step >= 9 and not is_apart and "another optimizer" in way:
            others.step()
    with evaluation():
        pass


def train(way: str, folder: str) -> None:
    """Train on every rank; rank 0 makes the mistake."""
    lifeline.GRACE_S = 1.5
    collective_order.LATE_S = 3.0
    if way.startswith(("fabric", "loop")):
        loop(way)
        return
    internal.PATIENCE_S = 200.0  # the others may be slow on a busy machine
    fewer = "fewer" in way and os.environ["RANK"] == "0"
    batches = 12 if not fewer else 1 if "only one" in way else 9
    torch.manual_seed(0)
    data = [DataLoader(TensorDataset(torch.randn(4 * count, 8)), 4) for count in (12, batches)]
    validates = "validation" in way
    settings = {"compress": "gradients"} if way == "unfreeze" or "only one" in way else {}
    if "no exchange there" in way:
        settings = {"local_steps": 8, "warmup_steps": 0}
    if "local steps" in way:
        settings = {"local_steps": 2, "warmup_steps": 0}
    if "in flight" in way:
        settings = {
            "exchange": "two_phase",
            "local_steps": 4,
            "overlap_steps": 2,
            "warmup_steps": 0,
        }
    strategy: Any = DCTStrategy(**settings)
    if way.startswith("stage"):
        strategy = DCTPipelineStrategy(stages=2, micro_batches=2)
    if way.startswith("shard"):
        strategy = DCTFSDPStrategy(replicas=1, unit=8)
    trainer = trainer_for(
        strategy,
        max_epochs=2 if "two epochs" in way else 1,
        default_root_dir=folder,
        enable_checkpointing="checkpoint" in way,
        num_sanity_val_steps=0,
        limit_val_batches=1.0 if "valid" in way else 0,
        callbacks=[LearningRateFinder(num_training_steps=9, early_stop_threshold=None)]
        if "search" in way
        else [],
    )
    kind = next((kind for kind in ("validate", "test", "predict") if way.endswith(kind)), "fit")
    getattr(trainer, kind)(Model(way), *(data if validates else data[1:]))
