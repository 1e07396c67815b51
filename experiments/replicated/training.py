"""One training of several replicas on a CPU: their modules, optimizers and batches, and what
validation finds.

Each replica has a module and an optimizer of its own, so it computes the bits of a rank.
:mod:`replicated.engines` exchanges after the optimizers' steps. Methods of others act in them
(:mod:`replicated.apart`). :mod:`replicated.side_by_side` trains on a GPU.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
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
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_dct import DCTConfig
from replicated.apart import MODULES, Apart
from replicated.engines import Engines
from streams import rank_rows

CONF = Path(__file__).parents[2] / "conf"
Batch = dict[str, Tensor]
History = list[tuple[int, float]]
Report = Callable[[int, float], None]
DENSE = "strategy=ddp"
LAST = 20
"""The loss is the mean over the last one in so many steps."""
CHECKS = 10
"""Validations in these last steps, and as many before."""
NUDGE = 1e-4
"""The standard deviation of a start's factors."""


@dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        overrides: Those of ``train.py``: the experiment, the strategy, the rate and the seed.
        ranks: Replicas that exchange.
        steps: Optimizer steps.
        device: ``"cpu"`` or ``"cuda"``.
        val_rows: Rows of the validation part that are scored, spread evenly over it.
        start: Of several that say how far apart runs end which begin almost alike: if it is not 0,
            each weight differs by about ``NUDGE`` of itself, in its own way for each number.
    """

    overrides: tuple[str, ...]
    ranks: int
    steps: int
    device: str = "cpu"
    val_rows: int = 512
    start: int = 0


class Figures(nn.Module):
    """Maps a batch to the figures of a module, the loss among them, and their number of
    examples.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Batch) -> tuple[dict[str, Tensor], Any]:
        """The figures of a batch."""
        return self.module.figures(batch)


def gradients_of_all(
    module: nn.Module,
) -> Callable[[Mapping[str, Tensor], Batch], tuple[dict[str, Tensor], Tensor]]:
    """A function of stacked weights and batches, ``[replicas, ...]`` each: gradients by name, and
    losses.
    """
    figures = Figures(module)

    def loss(weights: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return functional_call(
            figures, {f"module.{name}": one for name, one in weights.items()}, (batch,)
        )[0]["loss"]

    function = vmap(grad_and_value(loss))

    def call(weights: Mapping[str, Tensor], batches: Batch) -> tuple[dict[str, Tensor], Tensor]:
        # This one of its backends is batched on every device.
        with sdpa_kernel(SDPBackend.MATH):
            return function(weights, batches)

    return call


class Prepared:
    """What a job trains: the module of an experiment, its data, and what brings its replicas
    together.

    Attributes:
        settings: Of ``Updates``; None without them.
        method: The settings of a method of others; None without one.
        data_settings: Those that the data are made from, as YAML.
        shape: What trainings have in common whose weights and batches can be stacked: all settings
            of the module and the data but the rate and the seed, as YAML.

    Raises:
        ValueError: Replicas do not follow the strategy, or ranks would do what replicas do not.
    """

    def __init__(self, job: Job) -> None:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            words = [f"trainer.max_steps={job.steps}", f"trainer.devices={job.ranks}"]
            config = compose("train", [*job.overrides, *words])
        config.paths.root_dir = config.paths.output_dir = str(Path.cwd())
        self.job = job
        self.settings = _settings(job, config.strategy)
        self.method = config.strategy.get("method")
        seed_everything(config.seed, workers=True, verbose=False)
        self.data_settings = OmegaConf.to_yaml(config.data, resolve=True)
        self.data = _data_of(self.data_settings)
        apart = ("learning_rate", "seed")
        shared = (
            {name: one for name, one in part.items() if name not in apart}
            for part in (config.model, config.data)
        )
        self.shape = OmegaConf.to_yaml(OmegaConf.create(list(shared)))
        self.module = hydra.utils.instantiate(config.model)
        self.trainer = SimpleNamespace(datamodule=self.data, estimated_stepping_batches=job.steps)
        self.module.trainer = self.trainer
        self.module.configure_model()
        self.module.trainer = None
        if job.start:
            _nudge(self.module, job.start)
        left_out = (
            ("gradient_clip_val", None),
            ("accumulate_grad_batches", 1),
            ("precision", "32-true"),
        )
        for name, plain in left_out:
            if config.trainer.get(name) != plain:
                raise ValueError(
                    f"replicas do not follow trainer.{name}={config.trainer[name]}: use"
                    f" {plain or 'null'}"
                )
        if any(getattr(one, "track_running_stats", False) for one in self.module.modules()):
            raise ValueError(
                "replicas take no running statistics, as of BatchNorm: train with"
                " experiments/compare.py"
            )

    @property
    def replicas(self) -> int:
        """As many as ranks, or one for dense training."""
        return 1 if self.settings is None and self.method is None else self.job.ranks

    def optimizer_of(self, module: Any) -> tuple[torch.optim.Optimizer, Any]:
        """The optimizer of the module or of a copy, and its scheduler of steps, if it has one.

        Raises:
            ValueError: The module has several optimizers, or its scheduler has another interval.
        """
        module.trainer = self.trainer
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
        return made, scheduler


@torch.no_grad()
def _nudge(module: nn.Module, start: int) -> None:
    generator = torch.Generator().manual_seed(1000 + start)
    for weights in module.parameters():
        weights.mul_(1 + NUDGE * torch.randn(weights.shape, generator=generator))


@lru_cache(maxsize=4)
def _data_of(settings: str) -> Any:
    """A data module; trainings with the same seed share it."""
    data = hydra.utils.instantiate(OmegaConf.create(settings))
    data.prepare_data()
    data.setup("fit")
    return data


class Replicas:
    """The replicas of one training, with the data that they read as ranks would, and their
    exchanges.

    Dense training is that of one module on the batches of all ranks.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.modules = [copy.deepcopy(prepared.module) for _ in range(prepared.replicas)]
        self.optimizers, self._schedulers = zip(
            *map(prepared.optimizer_of, self.modules), strict=True
        )
        self.engines: Engines | None = None
        self.apart = (
            None
            if prepared.method is None
            else Apart(prepared.method, self.modules, self.optimizers)
        )
        if prepared.settings is not None:
            self.engines = Engines(
                prepared.settings, self.modules, self.optimizers, prepared.job.steps
            )
            self.engines.watch()
        self._step = 0

    def step(self) -> Tensor:
        """Make a step of all replicas, and return their losses before it, ``[replicas]``."""
        job = self.prepared.job
        data = self.prepared.data
        numbers = rank_rows(
            self._step, batch_size=job.ranks * data.batch_size, rank=0, world_size=1
        )
        batch = data.training_rows(numbers)
        losses = self.gradients(
            {
                name: rows.view(len(self.modules), -1, *rows.shape[1:])
                for name, rows in batch.items()
            }
        )
        together = self.engines or self.apart
        if together is not None:
            together.step()
        else:
            self.optimizers[0].step()
        for scheduler in filter(None, self._schedulers):
            scheduler.step()
        self._step += 1
        return losses

    def gradients(self, batches: Batch) -> Tensor:
        """Set gradients from batches, ``[replicas, rows, ...]``, and return the losses."""
        losses = []
        for number, module in enumerate(self.modules):
            module.zero_grad()
            loss = module.figures({name: rows[number] for name, rows in batches.items()})[0]["loss"]
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    def shared_weights(self) -> dict[str, Tensor]:
        """The weights that all ranks share, by name, or those of dense training."""
        together = self.engines or self.apart
        if together is not None:
            return together.shared_weights()
        return {name: parameter.detach() for name, parameter in self.modules[0].named_parameters()}


@torch.no_grad()
def mean_loss(module: nn.Module, weights: Mapping[str, Tensor], batches: Sequence[Batch]) -> float:
    """The mean loss of a module with some weights over the examples of batches."""
    total: Any = 0.0
    count: Any = 0
    given = {f"module.{name}": one for name, one in weights.items()}
    module.eval()
    for batch in batches:
        figures, examples = functional_call(Figures(module), given, (batch,))
        total = total + figures["loss"].double() * examples
        count = count + examples
    module.train()
    return float(total / count)


def rows_of_validation(data: Any, job: Job) -> list[Batch]:
    """Rows of the validation part that a job scores, spread evenly over it."""
    total = data.num_rows("val")
    rows = np.unique(np.linspace(0, total - 1, min(total, job.val_rows)).round().astype(np.int64))
    parts = np.array_split(rows, math.ceil(len(rows) / 64))
    return [
        {name: one.to(job.device) for name, one in data.evaluation_rows("val", part).items()}
        for part in parts
    ]


def train(job: Job, report: Report | None = None) -> dict[str, Any]:
    """Train a job, and return its figures as JSON has them; ``report`` gets the steps made and the
    latest loss.
    """
    replicas = Replicas(Prepared(job))
    validation = rows_of_validation(replicas.prepared.data, job)
    module = replicas.prepared.module
    checked = validated_after(job.steps)
    history = History()
    started = time.perf_counter()
    seconds = 0.0
    for step in range(1, job.steps + 1):
        replicas.step()
        if step in checked:
            seconds += time.perf_counter() - started
            history.append((step, mean_loss(module, replicas.shared_weights(), validation)))
            started = time.perf_counter()
        if report is not None and (step in checked or step % 50 == 0):
            report(step, history[-1][1] if history else math.nan)
    return figures_of(job, history, seconds, module, replicas.engines or replicas.apart)


def figures_of(
    job: Job,
    history: History,
    seconds: float,
    module: nn.Module,
    together: Engines | Apart | None,
) -> dict[str, Any]:
    """The figures of a run; ``together`` is what brought its replicas together."""
    last = [loss for step, loss in history if is_last(step, job.steps)]
    figures = {
        "loss": statistics.fmean(last),
        "noise": statistics.stdev(last) if len(last) > 1 and math.isfinite(sum(last)) else None,
        "history": history,
        "milliseconds_per_step": 1e3 * seconds / job.steps,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "torch": torch.__version__,
        "card": torch.cuda.get_device_name() if job.device == "cuda" else None,
    }
    if together is None:
        return {**figures, "ratio": 1.0, "exchange": None, "settings": None}
    return {**figures, **together.figures()}


def validated_after(steps: int) -> set[int]:
    """The steps after which a run is validated: every tenth part of it, and often in the last
    twentieth.
    """
    first = steps - steps // LAST
    last = np.linspace(first, steps, min(CHECKS, steps - first + 1)).round().astype(int).tolist()
    return {steps * part // CHECKS for part in range(1, CHECKS)} - {0} | set(last)


def is_last(step: int, steps: int) -> bool:
    """Whether a step is in the last twentieth of a run."""
    return step >= steps - steps // LAST


def _settings(job: Job, strategy: Any) -> dict[str, Any] | None:
    """The settings of ``Updates`` in those of ``strategy=dct``; None for dense training and the
    methods of others.
    """
    if DENSE in job.overrides:
        return None
    method = strategy.get("method")
    if method is not None and method._target_.rpartition(".")[0] in MODULES and job.device == "cpu":
        if method.sync_every > job.steps:
            raise ValueError(
                f"strategy.method.sync_every={method.sync_every}: a run of {job.steps} steps never"
                " syncs"
            )
        return None
    if strategy._target_ != "lightning_dct.DCTStrategy" or strategy.compress != "updates":
        raise ValueError(
            f"replicas train with {DENSE}, with strategy=dct and updates, and on a CPU with the"
            f" methods of {' and '.join(MODULES)}, not with {strategy._target_} on {job.device}"
        )
    known = {field.name for field in fields(DCTConfig)}
    given = OmegaConf.to_container(strategy, resolve=True)
    return {name: value for name, value in given.items() if name in known}
