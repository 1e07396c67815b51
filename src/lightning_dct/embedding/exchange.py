"""The collectives between the ranks that use rows and the ranks that own them, with every byte counted."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dct.embedding.placement import Int64Array
from lightning_dct.traffic import Traffic
from lightning_dct.wire import PayloadError


class Incoming(NamedTuple):
    """Bytes under way from every rank.

    Attributes:
        work: What to wait for; None on a single process.
        parts: What each rank sends, uint8; to be read after waiting.
    """

    work: dist.Work | None
    parts: list[Tensor]

    def wait(self) -> list[Tensor]:
        """Wait, and give the parts by rank."""
        if self.work is not None:
            self.work.wait()
        return self.parts


class Exchange:
    """All-to-all between the ranks of one group.

    Args:
        group: The ranks that take part; None for a single process.
        device: Where payloads live.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.rank = group.rank() if group else 0
        self.world_size = group.size() if group else 1
        self.device = device

    @classmethod
    def among_all(cls, device: torch.device) -> Exchange:
        """Between all ranks, on a group of its own: a collective call where a process group is up.

        Lightning broadcasts on the default group in between.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls(None, device)
        group = cast(dist.ProcessGroup, dist.new_group())
        exchange = cls(group, device)
        # torch.distributed keeps a group, with its threads and connections, until it is told otherwise.
        weakref.finalize(exchange, _destroy, group).atexit = False
        return exchange

    def announce(self, numbers: Int64Array, traffic: Traffic) -> Int64Array:
        """Tell each rank some numbers.

        Args:
            numbers: Shape ``[world size, n]``, each below 2**31: what each rank is told.
            traffic: Where the bytes are counted.

        Returns:
            Shape ``[world size, n]``: what each rank has told this one.
        """
        if self.group is None:
            return numbers
        told = torch.from_numpy(numbers.astype(np.int32)).to(self.device)
        heard = torch.empty_like(told)
        dist.all_to_all_single(heard, told, group=self.group)
        traffic.add(bytes_sent=(self.world_size - 1) * numbers.shape[1] * told.element_size())
        return heard.cpu().numpy().astype(np.int64)

    def start(self, payloads: Sequence[Tensor], sizes: Sequence[int], traffic: Traffic) -> Incoming:
        """Begin to send each rank its payload.

        Args:
            payloads: What goes to each rank, uint8; empty for this one.
            sizes: How many bytes each rank will send.
            traffic: Where the bytes are counted.
        """
        if self.group is None:
            return Incoming(None, list(payloads))
        sent = torch.cat(list(payloads))
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        lengths = [payload.numel() for payload in payloads]
        work = dist.all_to_all_single(received, sent, list(sizes), lengths, group=self.group, async_op=True)
        traffic.add(bytes_sent=sum(lengths) - lengths[self.rank])
        return Incoming(work, list(received.split(list(sizes))))


def check_announced(heard: Int64Array, least: int) -> None:
    """Refuse numbers that no rank announces.

    Args:
        heard: Shape ``[world size, n]``: what each rank has told this one.
        least: The smallest number there is.

    Raises:
        PayloadError: One is smaller.
    """
    for rank, numbers in enumerate(heard):
        if (numbers < least).any():
            raise PayloadError(f"Rank {rank} of the process group announces {numbers.min()} of something.")


def _destroy(group: dist.ProcessGroup) -> None:
    with suppress(ValueError):  # it has gone already, with the default group
        dist.destroy_process_group(group)
