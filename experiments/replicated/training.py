"""One training of several replicas: their modules, optimizers and batches, their steps, and what validation finds.

Gradients are those of each module by itself, with the bits of a rank of its own, or those of all replicas in one
batched call, which a GPU repeats as a CUDA graph. Optimizers then step in the threads of their ranks, and
``lightning_dct.Updates`` hangs on these steps.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import numpy as np
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch import seed_everything
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from lightning_dct import DCTConfig, Updates
from replicated.threads import ThreadedRanks
from streams import rank_rows

CONF = Path(__file__).parents[2] / "conf"
Batch = dict[str, Tensor]
Report = Callable[[int, float], None]
DENSE = "strategy=ddp"
LAST = 20
"""The loss is the mean over the last one in so many steps."""
CHECKS = 10
"""Validations in these last steps, and as many before."""


@dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        overrides: Those of ``train.py``: the experiment, the strategy, the rate and the seed.
        ranks: Replicas that exchange.
        steps: Optimizer steps.
        together: Gradients of all replicas in one batched call; None for that on a GPU only.
        device: ``"cpu"`` or ``"cuda"``.
        val_rows: Rows of the validation part that are scored, spread evenly over it.
    """

    overrides: tuple[str, ...]
    ranks: int
    steps: int
    together: bool | None = None
    device: str = "cpu"
    val_rows: int = 512


class Scored(nn.Module):
    """Maps a batch to the loss of a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a batch."""
        return self.module.figures(batch)[0]["loss"]


class Apart:
    """Gradients of one module after the other; each gets its own part of the batch."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [Scored(module) for module in modules]

    def __call__(self, batches: Batch) -> Tensor:
        """Set gradients from batches ``[replicas, rows, ...]``, and return the losses, ``[replicas]``."""
        losses = []
        for number, module in enumerate(self._modules):
            module.zero_grad()
            loss = module({name: rows[number] for name, rows in batches.items()})
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)


class Together:
    """Gradients of all replicas in one batched call, whose weights are stacked; on a GPU a CUDA graph.

    The weights of the modules become views of the stacks. They keep their addresses, and so do their gradients on a
    GPU.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        parameters = [dict(module.named_parameters()) for module in modules]
        self._stacks = {
            f"module.{name}": torch.stack([own[name].detach() for own in parameters]) for name in parameters[0]
        }
        self._parameters = parameters
        for rank, own in enumerate(parameters):
            for name, parameter in own.items():
                parameter.data = self._stacks[f"module.{name}"][rank]
        scored = Scored(modules[0])

        def loss(weights: Mapping[str, Tensor], batch: Batch) -> Tensor:
            return functional_call(scored, weights, (batch,))

        self._function = vmap(grad_and_value(loss))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batches: Batch = {}

    def __call__(self, batches: Batch) -> Tensor:
        """See :meth:`Apart.__call__`."""
        if not next(iter(self._stacks.values())).is_cuda:
            gradients, losses = self._function(self._stacks, batches)
            self._give(gradients)
            return losses
        if self._graph is None:
            self._capture(batches)
        for name, rows in batches.items():
            self._batches[name].copy_(rows, non_blocking=True)
        self._graph.replay()
        return self._losses

    def _capture(self, batches: Batch) -> None:
        self._batches = {name: rows.clone() for name, rows in batches.items()}
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):  # libraries allocate in the first calls
                self._function(self._stacks, self._batches)
        torch.cuda.current_stream().wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            gradients, self._losses = self._function(self._stacks, self._batches)
        self._give(gradients)

    def _give(self, gradients: Mapping[str, Tensor]) -> None:
        for rank, own in enumerate(self._parameters):
            for name, parameter in own.items():
                parameter.grad = gradients[f"module.{name}"][rank]


class Replicas:
    """Replicas of the module of an experiment, with the data that they read as its ranks would.

    Dense training is that of one module on the batches of all ranks.

    Raises:
        ValueError: The module has several optimizers, or the strategy is neither ``dct`` nor ``ddp``.
    """

    def __init__(self, job: Job, ranks: ThreadedRanks) -> None:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            words = [f"trainer.max_steps={job.steps}", f"trainer.devices={job.ranks}"]
            config = compose("train", [*job.overrides, *words])
        config.paths.root_dir = config.paths.output_dir = str(Path.cwd())
        self.job, self._ranks, self.device = job, ranks, torch.device(job.device)
        self.settings = _settings(job, config.strategy)
        seed_everything(config.seed, workers=True, verbose=False)
        self.data = hydra.utils.instantiate(config.data)
        self.data.prepare_data()
        self.data.setup("fit")
        first = hydra.utils.instantiate(config.model)
        trainer = SimpleNamespace(datamodule=self.data, estimated_stepping_batches=job.steps)
        first.trainer = trainer
        first.configure_model()
        first.trainer = None
        self.modules = [copy.deepcopy(first).to(self.device) for _ in range(ranks.world_size)]
        together = self.device.type == "cuda" if job.together is None else job.together
        self._gradients = (Together if together else Apart)(self.modules)
        self.optimizers, self._schedulers = [], []
        for module in self.modules:
            module.trainer = trainer
            optimizer, scheduler = _optimizer_of(module, fused=self.device.type == "cuda")
            self.optimizers.append(optimizer)
            self._schedulers.append(scheduler)
        self.updates: list[Updates] = []
        if self.settings is not None:
            self.updates = ranks.run(self._hang_on)
        self._validation = self._rows_of_validation()
        self._step = 0

    def _hang_on(self, rank: int) -> Updates:
        return Updates(self.modules[rank], self.optimizers[rank], steps=self.job.steps, **self.settings)

    def step(self) -> Tensor:
        """Make a step of all replicas, and return their losses before it, ``[replicas]``."""
        size, replicas = self.data.batch_size, len(self.modules)
        rows = rank_rows(self._step, batch_size=self.job.ranks * size, rank=0, world_size=1)
        batch = self.data.training_rows(rows)
        losses = self._gradients({name: self._to_device(all_rows, replicas) for name, all_rows in batch.items()})
        self._ranks.run(self._step_of)
        self._step += 1
        return losses

    def _step_of(self, rank: int) -> None:
        self.optimizers[rank].step()
        if self._schedulers[rank] is not None:
            self._schedulers[rank].step()

    def _to_device(self, rows: Tensor, replicas: int) -> Tensor:
        shaped = rows.reshape(replicas, -1, *rows.shape[1:])
        return shaped.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else shaped

    def validate(self) -> float:
        """The loss of the weights that all ranks share, over rows of the validation part."""
        if self.updates:
            return self._ranks.run(self._validate_shared)[0]
        return self._score()

    def _validate_shared(self, rank: int) -> float | None:
        with self.updates[rank].shared_weights():
            return self._score() if rank == 0 else None

    @torch.no_grad()
    def _score(self) -> float:
        total, count = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for batch in self._validation:
            figures, examples = self.modules[0].figures(batch)
            total += figures["loss"] * examples
            count += int(examples)
        return float(total) / count

    def _rows_of_validation(self) -> list[Batch]:
        total = self.data.num_rows("val")
        rows = np.unique(np.linspace(0, total - 1, min(total, self.job.val_rows)).round().astype(np.int64))
        parts = np.array_split(rows, math.ceil(len(rows) / 64))
        batches = [self.data.evaluation_rows("val", part) for part in parts]
        return [{name: one.to(self.device) for name, one in batch.items()} for batch in batches]

    def shared_weights(self) -> dict[str, Tensor]:
        """Copies of the weights that all ranks share, by name."""

        def read(rank: int) -> dict[str, Tensor]:
            with self.updates[rank].shared_weights():
                return {name: p.detach().clone() for name, p in self.modules[rank].named_parameters()}

        return self._ranks.run(read)[0]


def train(job: Job, report: Report | None = None) -> dict[str, Any]:
    """Train a job, and return its figures as JSON has them; ``report`` gets the steps made and the latest loss."""
    with ThreadedRanks(1 if DENSE in job.overrides else job.ranks) as ranks:
        replicas = Replicas(job, ranks)
        checked = validated_after(job.steps)
        history, started, seconds = [], time.perf_counter(), 0.0
        for step in range(1, job.steps + 1):
            replicas.step()
            if step in checked:
                if replicas.device.type == "cuda":
                    torch.cuda.synchronize()
                seconds += time.perf_counter() - started
                history.append((step, replicas.validate()))
                started = time.perf_counter()
            if report is not None and (step in checked or step % 50 == 0):
                report(step, history[-1][1] if history else math.nan)
        last = [loss for step, loss in history if is_last(step, job.steps)]
        figures = {
            "loss": statistics.fmean(last),
            "noise": statistics.stdev(last) if len(last) > 1 else None,
            "history": history,
            "milliseconds_per_step": 1e3 * seconds / job.steps,
            "parameters": sum(parameter.numel() for parameter in replicas.modules[0].parameters()),
            "learning_rate": replicas.optimizers[0].defaults["lr"],
            "torch": torch.__version__,
            "card": torch.cuda.get_device_name() if replicas.device.type == "cuda" else None,
        }
        if not replicas.updates:
            return {**figures, "ratio": 1.0, "exchange": None, "settings": None}
        # All ranks send as much, but for `two_phase`, whose owners differ a little.
        totals = [updates.traffic.totals for updates in replicas.updates]
        sent, dense = (sum(getattr(one, name) for one in totals) for name in ("bytes_sent", "bytes_dense"))
        first = replicas.updates[0]
        return {
            **figures,
            "ratio": dense / sent,
            "bytes_sent_per_step": sent / job.ranks / job.steps,
            "exchange": type(first.synchronizer.exchange).__name__,
            "settings": {name: getattr(first.config, name) for name in ("local_steps", "density", "exchange")},
        }


def validated_after(steps: int) -> set[int]:
    """The steps after which a run is validated: every tenth part of it, and often in the last twentieth."""
    first = steps - steps // LAST
    last = np.linspace(first, steps, min(CHECKS, steps - first + 1)).round().astype(int).tolist()
    return {steps * part // CHECKS for part in range(1, CHECKS)} - {0} | set(last)


def is_last(step: int, steps: int) -> bool:
    """Whether a step is in the last twentieth of a run."""
    return step >= steps - steps // LAST


def _settings(job: Job, strategy: Any) -> dict[str, Any] | None:
    """The settings of ``Updates`` in those of ``strategy=dct``; None for dense training."""
    if DENSE in job.overrides:
        return None
    if strategy._target_ != "lightning_dct.DCTStrategy" or strategy.compress != "updates":
        raise ValueError(f"replicas train with {DENSE} or with strategy=dct and updates, not with {strategy._target_}")
    known = {field.name for field in fields(DCTConfig)}
    given = OmegaConf.to_container(strategy, resolve=True)
    return {name: value for name, value in given.items() if name in known}


def _optimizer_of(module: Any, fused: bool) -> tuple[torch.optim.Optimizer, Any]:
    """A module's optimizer, with one kernel for all tensors if ``fused``, and its scheduler of steps, if it has one."""
    made = module.configure_optimizers()
    scheduler = None
    if isinstance(made, dict):
        made, given = made["optimizer"], made.get("lr_scheduler")
        if given is not None:
            if not isinstance(given, dict) or given.get("interval") != "step":
                raise ValueError("replicas take schedulers with `interval='step'` only")
            scheduler = given["scheduler"]
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError("replicas take modules with one optimizer only")
    for group in made.param_groups:
        if fused and "fused" in group:
            group["fused"], group["foreach"] = True, False
    return made, scheduler
