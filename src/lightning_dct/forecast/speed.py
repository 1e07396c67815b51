"""How fast this machine compresses and decompresses gradients: the code of a run, timed for a moment."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from time import perf_counter

import torch
from torch import Tensor

from lightning_dct.gradients.awaited import Awaited
from lightning_dct.gradients.compression import compress, decompress
from lightning_dct.gradients.plan import plan_bucket
from lightning_dct.kernels import fastest_kernel
from lightning_dct.threshold import Thresholds
from lightning_dct.updates.shared_weights import SharedWeights

# With residual and result beyond most caches, and still done within a time slice of a shared machine.
MEASURED_ENTRIES = 4_000_000
SENDERS = 4
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Speed:
    """The cost of each entry of a tensor, sent or not, at one density and value format.

    Attributes:
        compress: Seconds an entry: add, compare, compact, pack.
        clear: Seconds an entry for a result to be added to.
        add: Seconds an entry and sender: unpack and add.
        how: On what it was measured.
        move: Seconds an entry to see how far it has moved, and to move it; for updates only.
    """

    compress: float
    clear: float
    add: float
    how: str
    move: float = 0.0

    def seconds(self, exchange: str, entries: int, world_size: int, ranks_per_node: int) -> float:
        """How long a rank compresses and decompresses in a step, in which so many entries are compressed."""
        if exchange == "all_gather":
            per_entry = self.compress + self.clear + world_size * self.add
        elif exchange == "sharded":
            sums = self.compress + self.clear + world_size * self.add
            per_entry = self.compress + sums / world_size + self.clear + self.add
        else:
            nodes = world_size // ranks_per_node
            per_entry = self.compress / ranks_per_node + self.clear + nodes * self.add
        return entries * per_entry


def measure_speed(
    density: float,
    value_format: str,
    sizes: Sequence[int],
    min_tensor_size: int = 0,
    seconds: float = 1.0,
    device: torch.device | None = None,
) -> Speed:
    """Time the code that a run uses, with the settings of that run.

    Args:
        density: See :class:`~lightning_dct.DCTConfig`.
        value_format: See there.
        sizes: Entries of each tensor. Some millions at most are timed, the first ones.
        min_tensor_size: See there.
        seconds: For how long; everything is done a few times at least. The fastest time counts: other processes on the
            machine only ever add to it.
        device: By default a GPU if there is one.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bounds = [min(bound, MEASURED_ENTRIES) for bound in accumulate(sizes, initial=0)]
    sizes = [stop - start for start, stop in pairwise(bounds) if stop > start]
    names, size = [f"measured {index}" for index in range(len(sizes))], sum(sizes)
    # For a world in which compressing is worth it.
    plan = plan_bucket(
        names, sizes, [density] * len(sizes), torch.float32, value_format, min_tensor_size, link_traversals=0.0
    )
    if plan.is_dense:
        return Speed(0.0, 0.0, 0.0, f"nothing to measure: at density {density:g} tensors are sent dense")
    noise = torch.Generator(device).manual_seed(0)
    gradient = torch.randn(size, generator=noise, device=device)
    start = torch.randn(size, generator=noise, device=device)
    residual, total, thresholds, awaited = start.clone(), torch.empty_like(start), Thresholds(), Awaited()

    def pack() -> Tensor:
        return compress(gradient, residual, plan, set(), thresholds, 1.0, guard=True).payload

    def read(payloads: Tensor) -> None:
        decompress(payloads, total, plan, 0.5, awaited)

    weights, mean = SharedWeights(), torch.zeros(size, device=device)
    for name, part in zip(names, start.clone().split(sizes), strict=True):
        weights.adopt(name, part)

    def move() -> None:
        moved = weights.movement(names, plan.residual_dtype)
        weights.move(names, mean, torch.sub(moved, moved, out=moved))

    one = pack()[None]
    several = one.repeat(SENDERS, 1)
    # The residual as it was, or ever more of it would reach the threshold.
    actions: list[tuple[Callable[[], object], Callable[[], object]]] = [
        (lambda: residual.copy_(start), pack),
        (lambda: None, lambda: read(one)),
        (lambda: None, lambda: read(several)),
        (lambda: None, move),
    ]
    times: list[list[float]] = [[] for _ in actions]
    # Not counted: kernels are compiled, and memory is asked for.
    for prepare, action in actions:
        _timed(prepare, action, device)
    stop = perf_counter() + seconds
    while len(times[0]) < LEAST_ROUNDS or perf_counter() < stop:
        for found, (prepare, action) in zip(times, actions, strict=True):
            found.append(_timed(prepare, action, device))
    packing, reading, reading_several, moving = (min(found) / size for found in times)
    add = max(0.0, reading_several - reading) / (SENDERS - 1)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU thread(s)"
    how = (
        f"{1e3 * packing * size:.1f} ms for {size:,} entries, and {1e3 * reading * size:.1f} ms to read a payload of"
        f" them; measured here, on {where} with the kernel {fastest_kernel(device.type)!r}, best of {len(times[0])}"
    )
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores:
        how += f", while the machine was busy (load {load:.0f} on {cores} cores): an idle one is faster"
    return Speed(packing, max(0.0, reading - add), add, how, moving)


def _timed(prepare: Callable[[], object], action: Callable[[], object], device: torch.device) -> float:
    prepare()
    _wait_for(device)
    started = perf_counter()
    action()
    _wait_for(device)
    return perf_counter() - started


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
