"""Trains a case under a strategy, on the ranks of the default process group."""

import statistics
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR

from lightning_dct import Updates
from unlike.cases import CASES, mean_of_gradients

# The last tenth of a run is validated so many times, and the mean of the losses is compared.
VALIDATIONS = 5


def train(case: str, strategy: str, seed: int, steps: int | None = None) -> dict[str, Any]:
    """Train and return the loss, and how many times fewer bytes than dense fp32 were sent.

    Args:
        case: Its name.
        strategy: ``ddp``, or ``dct`` and settings of :class:`~lightning_dct.Updates`, as in ``dct
            density=0.3``.
        seed: Of weights and batches.
        steps: Instead of the case's own number.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    training = CASES[case](seed, rank, ranks)
    training.steps = steps or training.steps
    kind, *words = strategy.split()
    settings = {key: yaml.safe_load(value) for key, value in (word.split("=") for word in words)}
    updates = None
    if kind == "dct":
        updates = Updates(training.model, training.optimizers, steps=training.steps, **settings)
    schedules = [CosineAnnealingLR(optimizer, training.steps) for optimizer in training.optimizers]
    losses = []
    for step in range(1, training.steps + 1):
        training.loss().backward()
        if updates is None:
            mean_of_gradients(training.model, ranks)
        if training.clip is not None:
            if updates is None:
                clip_grad_norm_(training.model.parameters(), training.clip)
            else:
                updates.clip_grad_norm_(training.clip)
        for optimizer in training.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
        every = max(training.steps // (10 * VALIDATIONS), 1)
        if step > 0.9 * training.steps and step % every == 0:
            losses.append(_validated(training, updates))
    ratio = 1.0
    if updates is not None:
        ratio = updates.traffic.totals.compression_ratio or 0.0
        updates.close()
    return {"loss": statistics.fmean(losses), "ratio": ratio}


def _validated(training: Any, updates: Updates | None) -> float:
    training.model.eval()
    with torch.no_grad():
        if updates is None:
            loss = training.validate()
        else:
            with updates.shared_weights():
                loss = training.validate()
    training.model.train()
    return float(loss)
