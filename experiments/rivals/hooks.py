"""The synchronisations that DCT is compared with; each counts its bytes and its time.

torch's own hooks do the work where they exist; a :class:`lightning_dct.traffic.Traffic` counts at
each collective. Annotations are objects here, not strings: DistributedDataParallel reads those of
its hooks.
"""

from threading import Lock
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import Module

from lightning_dct.traffic import FP32_BYTES, Traffic, all_reduce_bytes
from rivals.top_k import TopKSynchronizer

SYNCHRONISATIONS = ("none", "fp32", "fp16", "bf16", "powersgd", "top_k")
"""Names that ``strategy.synchronisation`` takes."""

# PowerSGD names its parameters by bucket, so there must be one bucket, as it was before DDP rebuilt
# it.
_ONE_BUCKET_MEGABYTES = 1000


class _CountedHook:
    """The state of every hook here: the group, its size, the counter, and the dtype in which
    gradients travel.
    """

    def __init__(
        self, traffic: Traffic, group: dist.ProcessGroup, dtype: torch.dtype | None = None
    ) -> None:
        self.traffic = traffic
        self.group = group
        self.dtype = dtype
        self.world_size = group.size()
        # Callbacks of collectives run in threads of gloo, beside backward.
        self._counting = Lock()

    def count_time(self, started: float) -> None:
        """Count the time since ``started`` (of ``perf_counter``) as spent compressing."""
        with self._counting:
            self.traffic.add(seconds=perf_counter() - started)

    def count(self, bucket: dist.GradBucket, sent: list[tuple[int, int]]) -> None:
        """Count a bucket; ``sent`` has the entries of each all-reduce, and the bytes an entry."""
        entries = bucket.buffer().numel()
        with self._counting:
            self.traffic.add(
                steps=int(bucket.is_last()),
                bytes_sent=sum(
                    all_reduce_bytes(size * width, self.world_size) for size, width in sent
                ),
                bytes_dense=all_reduce_bytes(FP32_BYTES * entries, self.world_size),
                entries_sent=sum(size for size, _ in sent),
                entries=entries,
            )


class _PowerSGDCount(_CountedHook):
    """The same, with the state that PowerSGD carries from step to step."""

    def __init__(
        self, traffic: Traffic, group: dist.ProcessGroup, rank: int, start_step: int
    ) -> None:
        super().__init__(traffic, group)
        self.state = powerSGD_hook.PowerSGDState(
            process_group=group, matrix_approximation_rank=rank, start_powerSGD_iter=start_step
        )

    def entries_to_send(self, bucket: dist.GradBucket) -> list[int]:
        """Entries of each all-reduce that the hook makes for a bucket: as they are, then all P,
        then all Q.
        """
        if self.state.iter < self.state.start_powerSGD_iter:
            return [bucket.buffer().numel()]
        uncompressed = 0
        left = 0
        right = 0
        for gradient in bucket.gradients():
            rows = gradient.shape[0]
            columns = gradient.numel() // rows
            rank = min(rows, columns, self.state.matrix_approximation_rank)
            if (rows + columns) * rank * self.state.min_compression_rate < rows * columns:
                left += rows * rank
                right += columns * rank
            else:
                uncompressed += gradient.numel()
        return [uncompressed, left, right]


def counted_hook(
    state: _CountedHook, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients as they are, or rounded to two bytes; torch's hook for bfloat16 is refused
    off CUDA.

    What torch's hooks for two-byte gradients do: round, divide, sum over the ranks, and widen
    again.
    """
    started = perf_counter()
    buffer = bucket.buffer()
    dtype = state.dtype
    state.count(bucket, [(buffer.numel(), (dtype or buffer.dtype).itemsize)])
    if dtype is None:
        return default_hooks.allreduce_hook(state.group, bucket)
    rounded = buffer.to(dtype).div_(state.world_size)
    state.count_time(started)

    def widen(summed: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        started = perf_counter()
        buffer.copy_(summed.value()[0])
        state.count_time(started)
        return buffer

    return dist.all_reduce(rounded, group=state.group, async_op=True).get_future().then(widen)


def counted_powersgd_hook(
    state: _PowerSGDCount, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average low-rank factors of the gradients, with error feedback (Vogels, Karimireddy and
    Jaggi, 2019).

    torch's hook computes between its collectives, so the time counted as compressing has the
    waiting for them in it.
    """
    started = perf_counter()
    width = bucket.buffer().element_size()
    state.count(bucket, [(size, width) for size in state.entries_to_send(bucket)])

    def finish(averaged: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        state.count_time(started)
        return averaged.value()

    return powerSGD_hook.powerSGD_hook(state.state, bucket).then(finish)


class CountedDDPStrategy(DDPStrategy):
    """DDPStrategy with one of the rivals' ways of synchronising gradients, on any device, and a
    count of what it sends.

    Lightning registers hooks on CUDA only; this strategy does everywhere.

    ``none`` is the floor that a synchronisation is measured against: the module is not wrapped by
    DistributedDataParallel at all, and every rank trains a replica of its own on its own share of
    the data. What the Trainer itself sends stays, above all its broadcast of one number before each
    batch.

    Args:
        synchronisation: ``none``, ``fp32`` (plain DDP), ``fp16``, ``bf16``, ``powersgd`` or
            ``top_k``.
        rank: PowerSGD's rank.
        start_step: Steps that PowerSGD synchronises densely first; at least 2.
        density: Share of each tensor's entries that ``top_k`` sends, in (0, 1].
        **kwargs: As DDPStrategy takes them.

    Attributes:
        traffic: What was sent so far.

    Raises:
        ValueError: If a setting is out of range.
    """

    def __init__(
        self,
        synchronisation: str = "fp32",
        rank: int = 4,
        start_step: int = 100,
        density: float = 0.01,
        **kwargs: Any,
    ) -> None:
        if synchronisation not in SYNCHRONISATIONS:
            raise ValueError(
                f"strategy.synchronisation={synchronisation!r}: choose one of"
                f" {', '.join(SYNCHRONISATIONS)}"
            )
        if rank < 1:
            raise ValueError(f"strategy.rank={rank}: must be at least 1")
        if start_step < 2:
            raise ValueError(
                f"strategy.start_step={start_step}: PowerSGD needs at least 2 dense steps first"
            )
        if not 0 < density <= 1:
            raise ValueError(f"strategy.density={density}: must lie in (0, 1]")
        if synchronisation == "powersgd":
            kwargs.setdefault("bucket_cap_mb", _ONE_BUCKET_MEGABYTES)
        # As DCTStrategy does: a copy of every gradient less in each step, for all that are
        # compared.
        kwargs.setdefault("gradient_as_bucket_view", True)
        super().__init__(**kwargs)
        # The names of the files in conf/strategy/.
        self.strategy_name = {"fp32": "ddp", "fp16": "ddp_fp16", "bf16": "ddp_bf16"}.get(
            synchronisation, synchronisation
        )
        self.synchronisation = synchronisation
        self.rank = rank
        self.start_step = start_step
        self.density = density
        self.traffic = Traffic()

    def _setup_model(self, model: Module) -> Module:
        return model if self.synchronisation == "none" else super()._setup_model(model)

    def _register_ddp_hooks(self) -> None:
        group = dist.group.WORLD
        match self.synchronisation:
            case "none":
                return
            case "powersgd":
                rank_zero_info(
                    f"PowerSGD sends its first {self.start_step} steps dense"
                    " (`strategy.start_step`). They count in the compression ratio, which is 1.0x"
                    " in a run of no more."
                )
                state = _PowerSGDCount(self.traffic, group, self.rank, self.start_step)
                self.model.register_comm_hook(state, counted_powersgd_hook)
            case "top_k":
                synchronizer = TopKSynchronizer(
                    self.model.module, self.density, group, self.traffic
                )
                self.model.register_comm_hook(None, synchronizer.hook)
            case _:
                dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.synchronisation)
                self.model.register_comm_hook(
                    _CountedHook(self.traffic, group, dtype), counted_hook
                )
