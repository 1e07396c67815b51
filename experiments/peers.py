"""The ways of synchronising gradients that DCT is compared with, each counting the bytes it really sends.

torch's own hooks do the work; what is added is a :class:`lightning_dct.traffic.Traffic`, fed where tensors are handed
to the collective. Annotations are objects here, not strings: DistributedDataParallel reads those of its hooks.
"""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lightning_dct.traffic import FP32_BYTES, Traffic, all_reduce_bytes

SYNCHRONISATIONS = ("fp32", "fp16", "powersgd")
"""Names that ``strategy.synchronisation`` takes."""

# PowerSGD names its parameters by bucket, so there must be one bucket, as it was before DDP rebuilt it.
_ONE_BUCKET_MEGABYTES = 1000


class _CountedHook:
    """What every hook here needs: the group, its size and the counter."""

    def __init__(self, traffic: Traffic, group: dist.ProcessGroup) -> None:
        self.traffic = traffic
        self.group = group
        self.world_size = group.size()

    def count(self, bucket: dist.GradBucket, sent: list[tuple[int, int]]) -> None:
        """Count a bucket.

        Args:
            bucket: The bucket that is being synchronised.
            sent: For each all-reduce, its entries and the bytes an entry.
        """
        entries = bucket.buffer().numel()
        self.traffic.add(
            steps=int(bucket.is_last()),
            bytes_sent=sum(all_reduce_bytes(size * width, self.world_size) for size, width in sent),
            bytes_dense=all_reduce_bytes(FP32_BYTES * entries, self.world_size),
            entries_sent=sum(size for size, _ in sent),
            entries=entries,
        )


class _PowerSGDCount(_CountedHook):
    """The same, with the state that PowerSGD carries from step to step."""

    def __init__(self, traffic: Traffic, group: dist.ProcessGroup, rank: int, start_step: int) -> None:
        super().__init__(traffic, group)
        self.state = powerSGD_hook.PowerSGDState(
            process_group=group, matrix_approximation_rank=rank, start_powerSGD_iter=start_step
        )

    def entries_to_send(self, bucket: dist.GradBucket) -> list[int]:
        """Entries of each all-reduce that the hook makes for a bucket: as they are, then all P, then all Q."""
        if self.state.iter < self.state.start_powerSGD_iter:
            return [bucket.buffer().numel()]
        uncompressed, left, right = 0, 0, 0
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


def counted_fp32_hook(state: _CountedHook, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients as they are."""
    buffer = bucket.buffer()
    state.count(bucket, [(buffer.numel(), buffer.element_size())])
    return default_hooks.allreduce_hook(state.group, bucket)


def counted_fp16_hook(state: _CountedHook, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients rounded to half precision."""
    state.count(bucket, [(bucket.buffer().numel(), torch.float16.itemsize)])
    return default_hooks.fp16_compress_hook(state.group, bucket)


def counted_powersgd_hook(state: _PowerSGDCount, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average low-rank factors of the gradients, with error feedback (Vogels, Karimireddy and Jaggi, 2019)."""
    width = bucket.buffer().element_size()
    state.count(bucket, [(size, width) for size in state.entries_to_send(bucket)])
    return powerSGD_hook.powerSGD_hook(state.state, bucket)


class CountedDDPStrategy(DDPStrategy):
    """DDPStrategy with one of torch's gradient hooks, on any device, and a count of what it sends.

    Lightning registers hooks on CUDA only; this strategy does everywhere.

    Args:
        synchronisation: ``fp32`` (plain DDP), ``fp16`` or ``powersgd``.
        rank: PowerSGD's rank.
        start_step: Steps that PowerSGD synchronises densely first; at least 2.
        **kwargs: As DDPStrategy takes them.

    Attributes:
        traffic: What was sent so far.
        hook_state: The state of the registered hook; None before fit.

    Raises:
        ValueError: If a setting is out of range.
    """

    def __init__(self, synchronisation: str = "fp32", rank: int = 4, start_step: int = 100, **kwargs: Any) -> None:
        if synchronisation not in SYNCHRONISATIONS:
            raise ValueError(
                f"strategy.synchronisation={synchronisation!r}: choose one of {', '.join(SYNCHRONISATIONS)}"
            )
        if rank < 1:
            raise ValueError(f"strategy.rank={rank}: must be at least 1")
        if start_step < 2:
            raise ValueError(f"strategy.start_step={start_step}: PowerSGD needs at least 2 dense steps first")
        if synchronisation == "powersgd":
            kwargs.setdefault("bucket_cap_mb", _ONE_BUCKET_MEGABYTES)
        super().__init__(**kwargs)
        self.synchronisation = synchronisation
        self.rank = rank
        self.start_step = start_step
        self.traffic = Traffic()
        self.hook_state: _CountedHook | None = None

    def _register_ddp_hooks(self) -> None:
        group = dist.group.WORLD
        if self.synchronisation == "powersgd":
            self.hook_state = _PowerSGDCount(self.traffic, group, self.rank, self.start_step)
            hook = counted_powersgd_hook
        else:
            self.hook_state = _CountedHook(self.traffic, group)
            hook = counted_fp16_hook if self.synchronisation == "fp16" else counted_fp32_hook
        self.model.register_comm_hook(self.hook_state, hook)
