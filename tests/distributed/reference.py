"""The method in one process, in the plainest way: what the ranks must arrive at, step by step.

Thresholds are selected exactly in every step (``refresh_every=1``), and there is no guard. All is done in fp64, where
sums taken in another order differ too little to change which entries are sent or how they are rounded.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

Array = np.ndarray


def as_decoded(values: Array, value_format: str) -> Array:
    """What the receivers read where these values of one tensor were sent."""
    if value_format == "fp32":
        return values.astype(np.float32)
    if value_format == "bf16":
        return torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    if value_format == "int8":
        scale = np.float32(np.abs(values).max() / 127)
        return np.round(values / scale).astype(np.float32) * scale
    if value_format == "int4":
        scale = np.float32(np.abs(values).max())
        # The level nearest in ratio; zeros are never sent. Beyond the last comes zero.
        levels = np.clip(np.round(-2 * np.log2(np.abs(values) / scale)), 0, 7)
        factors = np.where(levels == 7, 0.0, 2.0 ** (-levels / 2)).astype(np.float32)
        return np.sign(values).astype(np.float32) * factors * scale
    mean = np.float32(np.abs(values).mean())
    return np.where(values > 0, mean, -mean).astype(np.float32)


def send(accumulated: Array, kept: int, value_format: str) -> Array:
    """What one rank sends of one flattened tensor: zero where it sends nothing."""
    magnitudes = np.abs(accumulated)
    threshold = np.sort(magnitudes)[-kept]
    chosen = [place for place, magnitude in enumerate(magnitudes) if magnitude >= threshold and magnitude > 0]
    chosen.sort(key=lambda place: (-magnitudes[place], place))
    places = np.array(sorted(chosen[:kept]), dtype=np.int64)
    sent = np.zeros_like(accumulated)
    sent[places] = as_decoded(accumulated[places], value_format)
    return sent


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module, int, int], Tensor],
    *,
    workers: int,
    steps: int,
    density: float,
    value_format: str,
    min_tensor_size: int,
    lr: float,
    momentum: float,
    exchange: str = "all_gather",
    workers_per_node: int = 1,
    average_every: int = 0,
) -> tuple[list[dict[str, Array]], dict[str, Array]]:
    """Train ``model`` in place with SGD.

    Returns what every worker holds back of its own gradients at the end, and what is held back of sums altogether.

    Args:
        model: The replica that all workers share, in fp64.
        loss_of: The loss of a worker in a step, from the model, the worker and the step.
        workers: How many to simulate.
        steps: Optimizer steps.
        density: Share of entries sent.
        value_format: ``fp32``, ``bf16``, ``int8``, ``int4`` or ``1bit``.
        min_tensor_size: Smaller tensors are averaged as they are.
        lr: Learning rate.
        momentum: Momentum of SGD.
        exchange: ``all_gather``, ``sharded`` (the sum is thresholded again) or ``by_node`` (the sums of the nodes are
            thresholded, and nothing else).
        workers_per_node: For ``by_node``.
        average_every: Steps after which workers, or nodes, average what they hold back; 0 for never.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    held = [{name: np.zeros(p.numel()) for name, p in model.named_parameters()} for _ in range(workers)]
    sums_held = [{name: np.zeros(p.numel()) for name, p in model.named_parameters()} for _ in range(workers)]
    owners = {"all_gather": 1, "sharded": workers, "by_node": workers_per_node}[exchange]
    for step in range(steps):
        gradients = [_gradients(model, loss_of(model, worker, step)) for worker in range(workers)]
        for name, parameter in model.named_parameters():
            entries = parameter.numel()
            kept = entries if entries < min_tensor_size else math.ceil(density * entries)
            sent = np.array([gradients[worker][name] for worker in range(workers)])
            for worker in range(workers if exchange == "by_node" else 0):
                sent[worker] += held[worker][name]
                held[worker][name] = np.zeros(entries)
            if exchange != "by_node":
                for worker in range(workers):
                    accumulated = sent[worker] + held[worker][name]
                    sent[worker] = send_pieces(accumulated, kept, value_format, owners)
                    held[worker][name] = accumulated - sent[worker]
            if exchange != "all_gather":
                # One sum of all workers, or one for each node.
                sent = sent.reshape(-1, workers if exchange == "sharded" else workers_per_node, entries).sum(axis=1)
                for place in range(len(sent)):
                    accumulated = sent[place] + sums_held[place][name]
                    sent[place] = send_pieces(accumulated, kept, value_format, owners)
                    sums_held[place][name] = accumulated - sent[place]
            parameter.grad = torch.from_numpy(sent.sum(axis=0) / workers).view_as(parameter)
        optimizer.step()
        if average_every and (step + 1) % average_every == 0:
            for some in [held, sums_held[: workers // workers_per_node]] if exchange == "by_node" else [held]:
                for name in some[0]:
                    mean = np.mean([one[name] for one in some], axis=0)
                    for one in some:
                        one[name] = mean.copy()
    return held, {name: np.sum([some[name] for some in sums_held], axis=0) for name in sums_held[0]}


def send_pieces(accumulated: Array, kept: int, value_format: str, owners: int, share: float = 1.0) -> Array:
    """The same in even pieces with thresholds of their own: one for each owner, if each sends 32 entries or more.

    With a share below 1 that many fewer are kept, of the same pieces.
    """
    if kept == len(accumulated):
        return accumulated.copy()
    pieces = np.array_split(np.arange(len(accumulated)), max(1, min(owners, kept // 32)))
    sent, some = np.zeros_like(accumulated), math.ceil(share * kept)
    for piece in pieces:
        sent[piece] = send(accumulated[piece], math.ceil(some * len(piece) / len(accumulated)), value_format)
    return sent


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Array]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    return {name: gradient.flatten().numpy() for name, gradient in zip(names, gradients, strict=True)}
