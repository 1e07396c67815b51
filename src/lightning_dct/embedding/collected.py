"""Collectives between the ranks that use rows and the ranks that own them, and the gradients that
arrive.

Collectives count every byte. Gradients are taken from autograd, collected from all ranks and put
into ``weight.grad``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NoReturn, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dct.agreement import gather_objects
from lightning_dct.embedding.owners import Int64Array
from lightning_dct.kernels import add_rows
from lightning_dct.traffic import Traffic
from lightning_dct.wire.positions import PayloadError

# A rank whose batch is wrong announces this instead of each number.
FAULT = -(2**31)


class RowCollectives:
    """All-to-all between the ranks of a group (None for a single process), with payloads on a
    device.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.rank = group.rank() if group else 0
        self.world_size = group.size() if group else 1
        self.peers = [peer for peer in range(self.world_size) if peer != self.rank]
        self.device = device
        self._keeps_group: RowCollectives | None = (
            None  # of a copy: the group ends with its original
        )
        # Called before each look-up, to compare what ranks do; a strategy sets it.
        self.check_order: Callable[[str], None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RowCollectives:
        """A copy for the same ranks with its own device: callbacks that average weights copy the
        whole model.
        """
        copied = RowCollectives(self.group, self.device)
        copied._keeps_group = self
        return copied

    def __reduce__(self) -> str | tuple[Any, ...]:
        """The contents of a file, without the group, which no file can hold."""
        if self.group is not None:
            raise TypeError(
                "Sharded tables cannot be pickled while they have a process group: each rank has"
                " rows of its own. Save a checkpoint with `trainer.save_checkpoint`, or this rank's"
                " rows with `state_dict()`."
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
        # Without this barrier, a rank that destroys the group at once would cut off others that
        # still connect.
        gather_objects(None, group)
        exchange = cls(group, device)
        # torch.distributed keeps a group, with its threads and connections, until it is destroyed.
        weakref.finalize(exchange, _destroy, group).atexit = False
        return exchange

    def announce(
        self, numbers: Int64Array, traffic: Traffic, least: int = 0, fault: Exception | None = None
    ) -> Int64Array:
        """Send each rank some numbers, such as the sizes of the messages that follow.

        ``numbers``, below 2**31, has a row for each receiver, shape ``[world size, n]``. The result
        has a row for each sender. A rank whose batch is wrong gives the error as ``fault``, and
        :data:`FAULT` for each number.

        Raises:
            PayloadError: A rank sends a number below ``least``.
            IndexError: A rank has this fault. Raised on every rank, like the next.
            TypeError: A rank has this fault.
            ValueError: A rank has another fault.
        """
        if self.group is None:
            if fault is not None:
                raise fault
            return numbers
        if self.check_order is not None:
            self.check_order("exact rows")
        sent = torch.from_numpy(numbers.astype(np.int32)).to(self.device)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        traffic.add(bytes_sent=(self.world_size - 1) * numbers.shape[1] * sent.element_size())
        announced = received.cpu().numpy().astype(np.int64)
        if (announced == FAULT).any():
            self.raise_fault(fault)
        check_announced(announced, least)
        return announced

    def raise_fault(self, fault: Exception | None) -> NoReturn:
        """Raise the first error of all ranks, of which ``fault`` is this one's; each rank calls
        it.
        """
        faults = gather_objects(fault, self.group)
        if fault is not None:
            raise fault
        rank, theirs = next((rank, each) for rank, each in enumerate(faults) if each is not None)
        raise type(theirs)(f"Rank {rank} of the process group: {theirs}")

    @property
    def takes_shorter(self) -> bool:
        """Whether a part that is shorter than expected arrives too: so ranks that are at different
        collectives find out.
        """
        return self.group is not None and dist.get_backend(self.group) == "gloo"

    def start(
        self,
        payloads: Mapping[int, Tensor],
        sizes: Mapping[int, int],
        traffic: Traffic,
        name: str = "",
    ) -> Callable[[], list[Tensor]]:
        """Start to send payloads, uint8, and to receive ``sizes`` bytes, both by rank; other ranks
        exchange nothing. Whoever counts bytes finds what is sent in ``name``.

        The result waits for what arrives, and returns it by rank.
        """
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        sent = [payloads.get(rank, empty) for rank in range(self.world_size)]
        if self.group is None:
            return lambda: sent
        lengths = [part.numel() for part in sent]
        expected = [sizes.get(rank, 0) for rank in range(self.world_size)]
        received = torch.empty(sum(expected), dtype=torch.uint8, device=self.device)
        work = dist.all_to_all_single(
            received, torch.cat(sent), expected, lengths, group=self.group, async_op=True
        )
        traffic.add(bytes_sent=sum(lengths) - lengths[self.rank])

        def wait() -> list[Tensor]:
            work.wait()
            return list(received.split(expected))

        return wait


def check_announced(announced: Int64Array, least: int) -> None:
    """Refuse numbers below ``least`` (PayloadError)."""
    for rank, numbers in enumerate(announced):
        if (numbers < least).any():
            raise PayloadError(
                f"Rank {rank} of the process group announces {numbers.min()} of something."
            )


def _destroy(group: dist.ProcessGroup) -> None:
    with suppress(ValueError):  # destroyed already, with the default group
        dist.destroy_process_group(group)


class CollectedGradients:
    """The gradients of this rank's rows that have arrived since the last backward ended."""

    def __init__(self, parts: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        # Places among this rank's rows (int64 ``[k]``) and gradients (``[k, dim]``), in order.
        self.parts = list(parts)
        self.ended_by = -1  # the backward that will end with them, of autograd's numbers

    def add(self, places: Tensor, gradient: Tensor) -> None:
        """Add the gradient of a rank's mean loss at ``places``; a row may occur more than once."""
        self.parts.append((places, gradient))

    def deliver(
        self,
        weight: Tensor,
        world_size: int,
        resolve: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> None:
        """Add the mean over ``world_size`` ranks to ``weight.grad`` as a sparse tensor, and forget
        the parts.

        ``resolve`` maps distinct places and their gradients to ascending rows of ``weight`` and
        their gradients.
        """
        # Some may be of a checkpoint, or of the time before the rows were moved or changed their
        # dtype.
        places, gradients = zip(*self.parts, strict=True)
        self.parts = []
        distinct, inverse = torch.unique(
            torch.cat([p.to(weight.device) for p in places]), return_inverse=True
        )
        dtype = torch.promote_types(weight.dtype, torch.float32)
        summed = torch.zeros(
            distinct.numel(), gradients[0].shape[1], dtype=dtype, device=weight.device
        )
        for part, gradient in zip(
            inverse.split([p.numel() for p in places]), gradients, strict=True
        ):
            add_rows(summed, part, gradient.to(summed))
        rows, mean = resolve(distinct, summed.div_(world_size).to(weight.dtype))
        gradient = torch.sparse_coo_tensor(
            rows.unsqueeze(0), mean, weight.shape, is_coalesced=True, check_invariants=False
        )
        weight.grad = gradient if weight.grad is None else (weight.grad + gradient).coalesce()


class DeliverRows(torch.autograd.Function):
    """Makes backward call ``send_gradient`` with the gradient of ``rows``.

    It sets the gradient of ``weight``.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, rows: Tensor, send_gradient: Callable[[Tensor], None]
    ) -> Tensor:
        """The rows, as they are."""
        ctx.send_gradient = send_gradient
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        """No gradient: ``send_gradient`` has it."""
        ctx.send_gradient(gradient)
        return None, None, None
