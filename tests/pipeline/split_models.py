"""Networks cut by split points, a module around them, and what a single process makes of the
same.
"""

import copy
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from distributed.training import Noise, Watch, trainer_for
from lightning_dct import DCTPipelineStrategy, SplitPoint, SplitSequential, subspace
from lightning_dct.activations.split_point import Anchored

DENSE: dict[str, Any] = {"density": 1.0, "forward_format": "fp32", "backward_format": "fp32"}
MICRO_BATCHES = 4
BATCH_SIZE = 8


def network(pieces: int, **split: Any) -> nn.Sequential:
    """The same weights on every rank and every time: 40 in, 8 out, a split point between every two
    pieces.
    """
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers: list[nn.Module] = []
        for piece in range(pieces):
            layers.append(nn.Linear(40 if piece == 0 else 24, 8 if piece == pieces - 1 else 24))
            if piece < pieces - 1:
                layers += [nn.Tanh(), *crossing(**split)]
        return SplitSequential(*layers)


def crossing(kind: str = "threshold", **settings: Any) -> tuple[nn.Module, ...]:
    """What stands between two pieces."""
    if kind == "threshold":
        return (SplitPoint(**settings),)
    if kind == "subspace":
        return subspace(24, **settings)
    # Not for processes that are started without the experiments on their path.
    from nlp.splits import make_split

    return tuple(make_split(24, 2, kind, **settings).values())


class SplitModule(LightningModule):
    """Regression with any optimizer; logs its loss in several ways."""

    def __init__(
        self,
        pieces: int = 2,
        split: dict[str, Any] | None = None,
        optimizer: Any = torch.optim.SGD,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.network = network(pieces, **(split or DENSE))
        self.optimizer = optimizer
        self.settings = settings or {"lr": 0.1}
        self.mean = MeanMetric()

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        # Rows are taken for tokens, of which the first number says which.
        anchored = any(isinstance(child, Anchored) for child in self.network)
        known = {"tokens": (inputs[:, 0] > 0).long()} if anchored else {}
        return (self.network(inputs.to(self.dtype), **known).float() - targets).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss)
        self.log_dict({"train/rows": float(len(batch[0])), "train/largest": loss}, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.mean.update(loss, weight=len(batch[0]))
        self.log("val/loss", loss, sync_dist=True)
        self.log("val/rows", float(len(batch[0])), reduce_fx="sum", sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val/mean", self.mean.compute())
        self.mean.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.network(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), **self.settings)


def replica(stages: int) -> int:
    """Which pipeline this rank belongs to."""
    return int(os.environ["RANK"]) // stages


def batches(count: int, stages: int, size: int = BATCH_SIZE, stream: int = 0) -> DataLoader:
    """This pipeline's batches."""
    return DataLoader(Noise(count, 40, 8, size, replica(stages) + stream), batch_size=None)


@dataclass
class Outcome:
    """What a rank has to tell of a run."""

    losses: list[float]
    hashes: list[str]
    weights: dict[str, Tensor]
    metrics: dict[str, float] = field(default_factory=dict)
    traffic: Any = None
    thresholds: dict[str, list[float]] = field(default_factory=dict)
    residuals: dict[str, Tensor] = field(default_factory=dict)


def strategy_for(stages: int, schedule: str = "1f1b", **settings: Any) -> DCTPipelineStrategy:
    """Exchanges gradients unless told otherwise: then pipelines train as a single process does."""
    settings = {"compress": "gradients", **settings}
    return DCTPipelineStrategy(
        stages=stages, schedule=schedule, micro_batches=MICRO_BATCHES, **settings
    )


def train(
    stages: int,
    schedule: str,
    pieces: int,
    split: dict[str, Any] | None = None,
    *,
    count: int = 6,
    validate: bool = False,
    optimizer: Any = torch.optim.SGD,
    optimizer_settings: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    make: Any = SplitModule,
    callbacks: tuple[Callback, ...] = (),
    **settings: Any,
) -> Outcome:
    """Fit a SplitModule on this rank."""
    module = make(pieces, split, optimizer, **(optimizer_settings or {}))
    chosen = strategy_for(stages, schedule, **(strategy or {"density": 1.0}))
    watch = Watch()
    trainer = trainer_for(chosen, callbacks=[watch, *callbacks], **settings)
    held_out = batches(3, stages, 7, 50) if validate else None
    trainer.fit(module, batches(count, stages), held_out, ckpt_path=ckpt_path)
    return outcome(trainer, module, watch)


def outcome(trainer: Trainer, module: SplitModule, watch: Watch) -> Outcome:
    return Outcome(
        watch.losses,
        watch.hashes,
        {name: parameter.detach().clone() for name, parameter in module.named_parameters()},
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        trainer.strategy.split_traffic.totals,
        {
            name: child.thresholds_in_use()
            for name, child in module.named_modules()
            if isinstance(child, SplitPoint)
        },
        trainer.strategy.synchronizer.residuals.state_dict(),
    )


def train_alone(
    pieces: int,
    split: dict[str, Any] | None = None,
    *,
    width: int = 1,
    count: int = 6,
    accumulate: int = 1,
    clip: float | None = None,
    optimizer: Any = torch.optim.SGD,
    optimizer_settings: dict[str, Any] | None = None,
    make: Any = SplitModule,
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """The same without a strategy: micro-batch by micro-batch, masks and rounding in the split
    points' own forward.

    Returns:
        Each pipeline's losses, and the weights.
    """
    module = make(pieces, split)
    # Every pipeline has thresholds of its own and the weights of all.
    copies = [module] + [copy.deepcopy(module) for _ in range(width - 1)]
    for other in copies[1:]:
        for name, child in other.network.named_children():
            if not isinstance(child, SplitPoint):
                other.network._modules[name] = module.network._modules[name]
    stepping = optimizer(module.parameters(), **(optimizer_settings or {"lr": 0.1}))
    data = [Noise(count, 40, 8, BATCH_SIZE, pipeline) for pipeline in range(width)]
    losses: list[list[float]] = [[] for _ in range(width)]
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    totals = [torch.zeros_like(parameter) for parameter in parameters]
    for index in range(count):
        for pipeline, one in enumerate(copies):
            for child in one.network:
                if isinstance(child, SplitPoint):
                    child.advance(index // accumulate)
            parts = zip(
                *(tensor.chunk(MICRO_BATCHES) for tensor in data[pipeline][index]), strict=True
            )
            values = []
            for part in parts:
                loss = one.loss(part)
                (loss / MICRO_BATCHES).backward()
                values.append(loss.detach())
            losses[pipeline].append(float(torch.stack(values).mean()))
            # Averaged only now: rounding on the wire depends on the gradients' scale.
            for total, parameter in zip(totals, parameters, strict=True):
                total += parameter.grad / (width * accumulate)
                parameter.grad = None
        if (index + 1) % accumulate == 0:
            for total, parameter in zip(totals, parameters, strict=True):
                parameter.grad = total.clone()
                total.zero_()
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            stepping.step()
            stepping.zero_grad()
    return losses, {
        name: parameter.detach().clone() for name, parameter in module.named_parameters()
    }


def worst(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of two sets of weights."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)
