"""The collectives between the ranks that use rows and the ranks that own them. They count every byte."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dct.agreement import gather_objects
from lightning_dct.embedding.owners import Int64Array
from lightning_dct.traffic import Traffic
from lightning_dct.wire.positions import PayloadError

# A rank whose batch is wrong announces this instead of each number.
FAULT = -(2**31)


class Incoming(NamedTuple):
    """An all-to-all under way."""

    work: dist.Work | None  # None on a single process
    parts: list[Tensor]  # uint8, from each rank; valid when the work is done

    def wait(self) -> list[Tensor]:
        """Wait for the parts, by rank."""
        if self.work is not None:
            self.work.wait()
        return self.parts


class RowCollectives:
    """All-to-all between the ranks of a group (None for a single process), with payloads on a device."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.rank = group.rank() if group else 0
        self.world_size = group.size() if group else 1
        self.device = device
        self._keeps_group: RowCollectives | None = None  # of a copy: the group ends with its original
        # Called before each look-up, to compare what ranks do; a strategy sets it.
        self.come_to: Callable[[], None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RowCollectives:
        """A copy for the same ranks with its own device: callbacks that average weights copy the whole model."""
        copied = RowCollectives(self.group, self.device)
        copied._keeps_group = self
        return copied

    def __reduce__(self) -> str | tuple[Any, ...]:
        """The contents of a file, without the group, which no file can hold."""
        if self.group is not None:
            raise TypeError(
                "Sharded tables cannot be pickled while they have a process group: each rank has rows of its own."
                " Save a checkpoint with `trainer.save_checkpoint`, or this rank's rows with `state_dict()`."
            )
        return super().__reduce__()

    @classmethod
    def among_all(cls, device: torch.device) -> RowCollectives:
        """An exchange between all ranks; a collective call if there are several.

        It has a group of its own, because Lightning broadcasts on the default group in between.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls(None, device)
        group = cast(dist.ProcessGroup, dist.new_group())
        # Without this barrier, a rank that destroys the group at once would cut off others that still connect.
        gather_objects(None, group)
        exchange = cls(group, device)
        # torch.distributed keeps a group, with its threads and connections, until it is destroyed.
        weakref.finalize(exchange, _destroy, group).atexit = False
        return exchange

    def announce(
        self, numbers: Int64Array, traffic: Traffic, least: int = 0, fault: Exception | None = None
    ) -> Int64Array:
        """Send each rank some numbers, such as the sizes of the messages that follow.

        ``numbers``, below 2**31, has a row for each receiver, shape ``[world size, n]``. The result has a row for each
        sender. A rank whose batch is wrong gives the error as ``fault``, and :data:`FAULT` for each number.

        Raises:
            PayloadError: A rank sends a number below ``least``.
            IndexError: A rank has this fault. Raised on every rank, like the next.
            ValueError: A rank has another fault.
        """
        if self.group is None:
            if fault is not None:
                raise fault
            return numbers
        if self.come_to is not None:
            self.come_to()
        sent = torch.from_numpy(numbers.astype(np.int32)).to(self.device)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        traffic.add(bytes_sent=(self.world_size - 1) * numbers.shape[1] * sent.element_size())
        announced = received.cpu().numpy().astype(np.int64)
        if (announced == FAULT).any():
            faults = gather_objects(None if fault is None else (isinstance(fault, IndexError), str(fault)), self.group)
            if fault is not None:
                raise fault
            rank, (is_index, message) = next((rank, each) for rank, each in enumerate(faults) if each is not None)
            raise (IndexError if is_index else ValueError)(f"Rank {rank} of the process group: {message}")
        check_announced(announced, least)
        return announced

    def start(self, payloads: Mapping[int, Tensor], sizes: Mapping[int, int], traffic: Traffic) -> Incoming:
        """Start to send payloads, uint8, and to receive ``sizes`` bytes, both by rank; other ranks exchange nothing."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        sent = [payloads.get(rank, empty) for rank in range(self.world_size)]
        if self.group is None:
            return Incoming(None, sent)
        lengths, expected = [part.numel() for part in sent], [sizes.get(rank, 0) for rank in range(self.world_size)]
        received = torch.empty(sum(expected), dtype=torch.uint8, device=self.device)
        work = dist.all_to_all_single(received, torch.cat(sent), expected, lengths, group=self.group, async_op=True)
        traffic.add(bytes_sent=sum(lengths) - lengths[self.rank])
        return Incoming(work, list(received.split(expected)))


def check_announced(announced: Int64Array, least: int) -> None:
    """Refuse numbers below ``least`` (PayloadError)."""
    for rank, numbers in enumerate(announced):
        if (numbers < least).any():
            raise PayloadError(f"Rank {rank} of the process group announces {numbers.min()} of something.")


def _destroy(group: dist.ProcessGroup) -> None:
    with suppress(ValueError):  # destroyed already, with the default group
        dist.destroy_process_group(group)
