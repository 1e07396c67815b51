"""The collectives: the one place where bytes leave this rank, and where they are counted."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dct.traffic import Traffic, all_gather_bytes, all_reduce_bytes


def all_gather_payload(payload: Tensor, group: dist.ProcessGroup, traffic: Traffic) -> tuple[dist.Work, Tensor]:
    """Start sending one rank's payload to all others.

    Args:
        payload: Shape ``[size]``, uint8, of the same size on every rank.
        group: The ranks that take part.
        traffic: Where the bytes are counted.

    Returns:
        What to wait for, and then to read: the payloads by rank, shape ``[world size, size]``, uint8.
    """
    world_size = group.size()
    traffic.add(bytes_sent=all_gather_bytes(payload.numel(), world_size))
    gathered = torch.empty(world_size * payload.numel(), dtype=torch.uint8, device=payload.device)
    work = dist.all_gather_single(gathered, payload, group=group, async_op=True)
    return work, gathered.view(world_size, -1)


def all_reduce_mean(buffer: Tensor, group: dist.ProcessGroup, traffic: Traffic) -> dist.Work:
    """Start averaging a dense tensor over all ranks, in place, exactly as DistributedDataParallel does.

    Args:
        buffer: Any shape and floating dtype.
        group: The ranks that take part.
        traffic: Where the bytes are counted.
    """
    traffic.add(bytes_sent=all_reduce_bytes(buffer.numel() * buffer.element_size(), group.size()))
    # Dividing first keeps fp16 sums from overflowing.
    buffer.div_(group.size())
    return dist.all_reduce(buffer, group=group, async_op=True)


def all_reduce_mean_sparse(gradient: Tensor, group: dist.ProcessGroup, traffic: Traffic) -> dist.Work:
    """Start averaging the sparse gradient of an ``Embedding(sparse=True)``, uncompressed, as plain DDP does.

    The backend gathers every rank's indices and rows. They are counted alike as sent and as the dense baseline,
    because that is what DDP sends too: a ratio of one.

    Args:
        gradient: A sparse COO tensor, averaged in place.
        group: The ranks that take part.
        traffic: Where the bytes are counted.
    """
    indices, values = gradient._indices(), gradient._values()
    num_bytes = indices.numel() * indices.element_size() + values.numel() * values.element_size()
    sent = all_gather_bytes(num_bytes, group.size())
    traffic.add(bytes_sent=sent, bytes_dense=sent, entries_sent=values.numel(), entries=values.numel())
    gradient.div_(group.size())
    return dist.all_reduce(gradient, group=group, async_op=True)
