"""The collectives between the ranks that use rows and the ranks that own them, with every byte counted."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dct.agreement import gather_objects
from lightning_dct.embedding.placement import Int64Array
from lightning_dct.traffic import Traffic
from lightning_dct.wire import PayloadError

# What a rank announces instead of numbers when it cannot take part.
FAULT = -(2**31)


class Incoming(NamedTuple):
    """Bytes under way: what each rank sends, uint8, valid after the work is done (None on a single process)."""

    work: dist.Work | None
    parts: list[Tensor]

    def wait(self) -> list[Tensor]:
        """The parts by rank, when they have arrived."""
        if self.work is not None:
            self.work.wait()
        return self.parts


class Exchange:
    """All-to-all between the ranks of one group (None for a single process), with payloads on a device."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.rank = group.rank() if group else 0
        self.world_size = group.size() if group else 1
        self.device = device

    @classmethod
    def among_all(cls, device: torch.device) -> Exchange:
        """Between all ranks: a collective call where a process group is up.

        The exchange has a group of its own, because Lightning broadcasts on the default group in between.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls(None, device)
        group = cast(dist.ProcessGroup, dist.new_group())
        # A rank that destroys the group at once would cut off others that still connect.
        dist.all_gather_object([None] * group.size(), None, group=group)
        exchange = cls(group, device)
        # torch.distributed keeps a group, with its threads and connections, until somebody destroys it.
        weakref.finalize(exchange, _destroy, group).atexit = False
        return exchange

    def announce(
        self, numbers: Int64Array, traffic: Traffic, least: int = 0, fault: Exception | None = None
    ) -> Int64Array:
        """Send each rank some numbers, such as the sizes of what follows.

        ``numbers``, each below 2**31, has a row per receiver, shape ``[world size, n]``; the result one per sender.
        A rank whose batch is wrong gives its ``fault`` and as many numbers of :data:`FAULT`.

        Raises:
            PayloadError: A rank sends a number below ``least``.
            IndexError: A rank has this fault. Raised on every rank, like the next.
            ValueError: A rank has another fault.
        """
        if fault is not None and self.group is None:
            raise fault
        if self.group is None:
            return numbers
        sent = torch.from_numpy(numbers.astype(np.int32)).to(self.device)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        traffic.add(bytes_sent=(self.world_size - 1) * numbers.shape[1] * sent.element_size())
        announced = received.cpu().numpy().astype(np.int64)
        if (announced == FAULT).any():
            self._raise_everywhere(fault)
        check_announced(announced, least)
        return announced

    def _raise_everywhere(self, fault: Exception | None) -> None:
        told = gather_objects(None if fault is None else (isinstance(fault, IndexError), str(fault)), self.group)
        if fault is not None:
            raise fault
        for rank, (is_index, message) in ((rank, each) for rank, each in enumerate(told) if each is not None):
            raise (IndexError if is_index else ValueError)(f"Rank {rank} of the process group: {message}")

    def start(self, payloads: Sequence[Tensor], sizes: Sequence[int], traffic: Traffic) -> Incoming:
        """Begin to send each rank its payload, uint8, empty for this one; each rank will send ``sizes`` bytes."""
        if self.group is None:
            return Incoming(None, list(payloads))
        sent = torch.cat(list(payloads))
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        lengths = [payload.numel() for payload in payloads]
        work = dist.all_to_all_single(received, sent, list(sizes), lengths, group=self.group, async_op=True)
        traffic.add(bytes_sent=sum(lengths) - lengths[self.rank])
        return Incoming(work, list(received.split(list(sizes))))


def check_announced(announced: Int64Array, least: int) -> None:
    """Refuse numbers below ``least``, which no rank announces (PayloadError)."""
    for rank, numbers in enumerate(announced):
        if (numbers < least).any():
            raise PayloadError(f"Rank {rank} of the process group announces {numbers.min()} of something.")


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Name the source, such as a rank, in every PayloadError that arises inside."""
    try:
        yield
    except PayloadError as error:
        raise PayloadError(f"{source}: {error}.") from error


def _destroy(group: dist.ProcessGroup) -> None:
    with suppress(ValueError):  # destroyed already, with the default group
        dist.destroy_process_group(group)
