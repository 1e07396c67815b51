"""Exchanged updates in one process, in the plainest way: what the ranks must arrive at, step by step.

Thresholds are selected exactly in every exchange (``refresh_every=1``), and there is no guard. All is done in fp64.
"""

import copy
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from distributed.reference import Array, send_pieces

Weights = dict[str, Array]


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module, int, int], Tensor],
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    workers: int,
    steps: int,
    local_steps: int,
    warmup_steps: int,
    residual_decay: float,
    delay: int = 0,
    density: float,
    value_format: str,
    min_tensor_size: int,
    exchange: str = "all_gather",
    workers_per_node: int = 1,
) -> tuple[Weights, list[Weights], Weights]:
    """Train and return the shared weights, each worker's own, and what is held back of sums altogether, flattened.

    Args:
        model: The weights to begin with, in fp64.
        loss_of: The loss of a worker in a step, from its model, the worker and the step.
        optimizer_of: Makes a worker's optimizer.
        workers: How many to simulate.
        steps: Optimizer steps.
        local_steps: Steps from one exchange to the next.
        warmup_steps: Steps in which they are an eighth, and the entries as much fewer.
        residual_decay: What remains of what a worker has not sent, in warm-up steps.
        delay: Steps that an exchange travels.
        density: Share of entries sent.
        value_format: As in the settings.
        min_tensor_size: Smaller tensors are averaged as they are.
        exchange: ``all_gather``, ``sharded`` or ``by_node``.
        workers_per_node: For ``by_node``.
    """
    models = [copy.deepcopy(model) for _ in range(workers)]
    optimizers = [optimizer_of(own) for own in models]
    shared = {name: p.detach().numpy().flatten().copy() for name, p in model.named_parameters()}
    sums_held = [{name: np.zeros(len(weights)) for name, weights in shared.items()} for _ in range(workers)]
    on_its_way: list[tuple[int, dict[str, Array], list[dict[str, Array]]]] = []

    def own(worker: int, name: str) -> Array:
        return dict(models[worker].named_parameters())[name].detach().numpy().reshape(-1)

    def apply(mean: dict[str, Array], lost: list[dict[str, Array]]) -> None:
        for name in shared:
            shared[name] += mean[name]
            for worker in range(workers):
                own(worker, name)[:] += mean[name] - lost[worker][name]

    for step in range(1, steps + 1):
        for worker in range(workers):
            optimizers[worker].zero_grad()
            loss_of(models[worker], worker, step - 1).backward()
            optimizers[worker].step()
        if on_its_way and on_its_way[0][0] == step:
            apply(*on_its_way.pop(0)[1:])
        length = max(1, local_steps // 8) if step <= warmup_steps else local_steps
        if on_its_way or step % length:
            continue
        mean: dict[str, Array] = {}
        sent: list[dict[str, Array]] = [{} for _ in range(workers)]
        lost: list[dict[str, Array]] = [{} for _ in range(workers)]
        for name in shared:
            entries = len(shared[name])
            kept = entries if entries < min_tensor_size else math.ceil(density * entries)
            moved = [own(worker, name) - shared[name] for worker in range(workers)]
            owners = {"all_gather": 1, "sharded": workers, "by_node": workers_per_node}[exchange]
            how = kept, value_format, owners, length / local_steps
            for worker in range(workers):
                whole = exchange == "by_node"
                sent[worker][name] = moved[worker] if whole else send_pieces(moved[worker], *how)
                left = moved[worker] - sent[worker][name]
                lost[worker][name] = sent[worker][name] + (1 - residual_decay) * left * (step <= warmup_steps)
            arrived = np.array([one[name] for one in sent])
            if exchange != "all_gather" and kept < entries:
                # One sum of all workers, or one for each node, thresholded again.
                together = arrived.reshape(-1, workers if exchange == "sharded" else workers_per_node, entries)
                arrived = by_senders(together) if exchange == "sharded" else together.sum(1)
                for place in range(len(arrived)):
                    accumulated = arrived[place] + sums_held[place][name]
                    arrived[place] = send_pieces(accumulated, *how)
                    sums_held[place][name] = accumulated - arrived[place]
            mean[name] = (by_senders(arrived[None])[0] if kept < entries else arrived.sum(axis=0)) / workers
        on_its_way.append((step + min(delay, length), mean, lost))
        if not delay:
            apply(*on_its_way.pop()[1:])
    owns = [{name: own(worker, name).copy() for name in shared} for worker in range(workers)]
    return shared, owns, {name: np.sum([some[name] for some in sums_held], axis=0) for name in shared}


def by_senders(arrived: Array) -> Array:
    """Sums over the second axis; an entry that n of W senders have sent counts sqrt(W / n) times."""
    senders = np.count_nonzero(arrived, axis=1)
    return arrived.sum(axis=1) * np.sqrt(arrived.shape[1] / np.maximum(senders, 1))
