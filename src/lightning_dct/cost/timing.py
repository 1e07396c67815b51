"""Times compressing and the link between the ranks, briefly, before a run trains."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dct.compress.awaited import clock_of
from lightning_dct.compress.bucket_plan import Bucket, Received, plan_bucket
from lightning_dct.compress.codec import compress, decompress
from lightning_dct.compress.error_feedback import ErrorFeedback
from lightning_dct.config import DCTConfig
from lightning_dct.kernels import fastest_kernel
from lightning_dct.traffic import FP32_BYTES, all_reduce_bytes

# Larger than most caches, and still fast enough for a time slice of a shared machine.
MEASURED_ENTRIES = 4_000_000
SENDERS = 4
LEAST_ROUNDS = 3
# Bytes of the tensors that are all-reduced, one after the other.
SIZES = (1 << 16, 1 << 18, 1 << 20)
LONGEST = 0.02  # seconds after which no larger tensor is tried: a slow link shows its rate early
ROUNDS = 2


@dataclass(frozen=True)
class Speed:
    """The cost of each entry of a tensor, sent or not, at one density and value format, in
    seconds.
    """

    compress: float  # add, compare, compact, pack
    clear: float  # make room for a sum
    add: float  # unpack and add, for each sender
    measurement: str  # in words

    def seconds(self, exchange: str, entries: int, world_size: int, ranks_per_node: int) -> float:
        """The seconds that a rank compresses and decompresses in a step of so many compressed
        entries.
        """
        gather = self.compress + self.clear + world_size * self.add
        if exchange == "all_gather":
            return entries * gather
        if exchange == "two_phase":
            return entries * (self.compress + gather / world_size + self.clear + self.add)
        nodes = world_size // ranks_per_node
        return entries * (self.compress / ranks_per_node + self.clear + nodes * self.add)


def measure_speed(
    config: DCTConfig, sizes: Sequence[int], seconds: float, device: torch.device
) -> Speed:
    """Time the code that a run uses, for at least so many seconds.

    The fastest of a few times counts, because other processes only add to it. ``sizes`` are the
    entries of each tensor, of which at most the first few millions are timed.
    """
    bounds = [min(bound, MEASURED_ENTRIES) for bound in accumulate(sizes, initial=0)]
    sizes = [stop - start for start, stop in pairwise(bounds) if stop > start]
    names = [f"measured {index}" for index in range(len(sizes))]
    size = sum(sizes)
    # Without link traversals compressing is always worth it.
    densities = [config.density] * len(sizes)
    smallest = config.min_tensor_size
    plan = plan_bucket(
        names, sizes, densities, torch.float32, config.value_format, smallest, link_traversals=0.0
    )
    if plan.is_dense:
        return Speed(
            0.0,
            0.0,
            0.0,
            f"nothing to measure: at density {config.density:g} tensors are sent dense",
        )
    noise = torch.Generator(device).manual_seed(0)
    gradient = torch.randn(size, generator=noise, device=device)
    start = torch.randn(size, generator=noise, device=device)
    residual = start.clone()
    total = torch.empty_like(start)
    feedback = ErrorFeedback({}, adapt_threshold=True, undoable=False)

    def pack() -> Tensor:
        return compress(feedback, Bucket([gradient], [residual], 1.0), plan, set())[0]

    def read(payloads: Tensor) -> None:
        decompress(feedback, Received(payloads, plan, 0.5, own=0), total)

    one = pack()[None]
    several = one.repeat(SENDERS, 1)
    actions: tuple[Callable[[], object], ...] = pack, lambda: read(one), lambda: read(several)
    times: list[list[float]] = [[] for _ in actions]
    stop = perf_counter() + seconds
    # The first round compiles kernels and allocates memory.
    while len(times[0]) <= LEAST_ROUNDS or perf_counter() < stop:
        for found, action in zip(times, actions, strict=True):
            residual.copy_(start)  # or ever more of it would reach the threshold
            found.append(_timed(action, device))
    times = [found[1:] for found in times]
    packing, reading, reading_several = (min(found) / size for found in times)
    add = max(0.0, reading_several - reading) / (SENDERS - 1)
    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{torch.get_num_threads()} CPU thread(s)"
    )
    measurement = (
        f"{1e3 * packing * size:.1f} ms for {size:,} entries, and {1e3 * reading * size:.1f} ms to"
        f" read a payload of them; measured here, on {where} with the kernel"
        f" {fastest_kernel(device.type)!r}, best of {len(times[0])}"
    )
    load = os.getloadavg()[0]
    cores = os.cpu_count() or 1
    if load > cores:
        measurement += (
            f", while the machine was busy (load {load:.0f} on {cores} cores): an idle one is"
            " faster"
        )
    return Speed(packing, max(0.0, reading - add), add, measurement)


@dataclass(frozen=True)
class MeasuredLink:
    """The time of all-reduces on the slowest of ``world_size`` ranks: of an empty one, and of each
    byte more.
    """

    world_size: int
    latency: float
    seconds_per_byte: float

    def all_reduce_seconds(self, num_bytes: int) -> float:
        """The time of an all-reduce."""
        return self.latency + num_bytes * self.seconds_per_byte

    @property
    def bits_per_second(self) -> float | None:
        """Rate at which each rank of a ring sends during an all-reduce; None if further bytes took
        no time.
        """
        sent = 8 * all_reduce_bytes(SIZES[-1], self.world_size) / SIZES[-1]
        return sent / self.seconds_per_byte if self.seconds_per_byte else None


def measure_link(group: dist.ProcessGroup, device: torch.device) -> MeasuredLink:
    """Time all-reduces of growing size; a collective call of two ranks or more, whose bytes are not
    counted.
    """
    # Connects and synchronises the ranks.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    times: list[float] = []
    for size in SIZES:
        tensor = torch.zeros(size // FP32_BYTES, device=device)
        # With the slowest rank's time, all ranks stop at the same size.
        own = min(
            _timed(partial(dist.all_reduce, tensor, group=group), device) for _ in range(ROUNDS)
        )
        slowest = torch.tensor(own, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
        times.append(slowest.item())
        if len(times) > 1 and times[-1] > LONGEST:
            break
    # Noise may make the line steeper than through zero, on which small tensors would take no time.
    smaller = SIZES[len(times) - 2]
    slope = min(max(0.0, (times[-1] - times[-2]) / (size - smaller)), times[-1] / size)
    return MeasuredLink(group.size(), max(0.0, times[-1] - size * slope), slope)


def _timed(action: Callable[[], object], device: torch.device) -> float:
    clock = clock_of(device)
    started = clock.mark()
    action()
    return clock.seconds(started, clock.mark())
