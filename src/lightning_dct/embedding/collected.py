"""Collectives between the ranks that use rows and the ranks that own them, and the gradients that
arrive.

Collectives count every byte. Gradients are taken from autograd, collected from all ranks and put
into ``weight.grad``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dct.agreement import gather_objects
from lightning_dct.embedding.bags import distinct
from lightning_dct.embedding.on_device import DeferredReads
from lightning_dct.embedding.owners import Int64Array
from lightning_dct.kernels import add_in_order, add_rows
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
        payloads: Mapping[int, Tensor | Sequence[Tensor]],
        sizes: Mapping[int, int],
        traffic: Traffic,
        name: str = "",
    ) -> Callable[[], list[Tensor]]:
        """Start to send payloads, uint8, whole or in parts, and to receive ``sizes`` bytes, both by
        rank; other ranks exchange nothing. Whoever counts bytes finds what is sent in ``name``.

        The result waits for what arrives, and returns it by rank.
        """
        parts: list[Tensor] = []
        lengths = []
        for rank in range(self.world_size):
            given = payloads.get(rank, ())
            given = (given,) if isinstance(given, Tensor) else given
            parts += given
            lengths.append(sum(part.numel() for part in given))
        parts = parts or [torch.empty(0, dtype=torch.uint8, device=self.device)]
        sent = torch.cat(parts)
        if self.group is None:
            return lambda: [sent]
        expected = [sizes.get(rank, 0) for rank in range(self.world_size)]
        received = torch.empty(sum(expected), dtype=torch.uint8, device=self.device)
        work = dist.all_to_all_single(
            received, sent, expected, lengths, group=self.group, async_op=True
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
        # In order, places among this rank's rows (int64 ``[k]``) and gradients (``[k, dim]``); or
        # places and columns (int64 ``[2, k]``) and entries (``[k]``).
        self.parts = list(parts)
        self.ended_by = -1  # the backward that will end with them, of autograd's numbers

    def add(self, places: Tensor, gradient: Tensor) -> None:
        """Add the gradient of a rank's mean loss at ``places``; a row may occur more than once."""
        self.parts.append((places, gradient))

    def add_entries(self, rows: Tensor, positions: Tensor, values: Tensor, dim: int) -> None:
        """Add entries of gradients of rows on a device.

        Args:
            rows: Shape ``[k]``, int64: their places.
            positions: Shape ``[n]``, int64: positions in the flattened rows.
            values: Shape ``[n]``.
            dim: Entries a row.
        """
        row = positions // dim
        # How many rows are touched, only the device knows; its host reads that once, for all parts.
        columns = torch.add(positions, row, alpha=-dim)
        self.parts.append((torch.stack([rows.index_select(0, row), columns]), values))

    def deliver(
        self,
        weight: Tensor,
        world_size: int,
        resolve: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        reads: DeferredReads,
        number: int | None = None,
    ) -> None:
        """Add the mean over ``world_size`` ranks to ``weight.grad`` as a sparse tensor, and forget
        the parts.

        ``resolve`` maps distinct places and their gradients to ascending rows of ``weight`` and
        their gradients. Places are below ``number`` if it is given.
        """
        # Some may be of a checkpoint, or of the time before the rows were moved or changed their
        # dtype.
        parts = [(places.to(weight.device), gradient) for places, gradient in self.parts]
        self.parts = []
        rows = [places[0] if places.ndim == 2 else places for places, _ in parts]
        found, inverse = _distinct(torch.cat(rows), reads, number)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        dim = next(gradient.shape[1] for _, gradient in parts if gradient.ndim == 2)
        summed = torch.zeros(found.numel(), dim, dtype=dtype, device=weight.device)
        at_each = inverse.split([part.numel() for part in rows])
        for at, (places, gradient) in zip(at_each, parts, strict=True):
            if places.ndim == 2:
                entries = torch.add(places[1], at, alpha=dim)
                add_in_order(summed.view(-1), entries, gradient.to(summed))
            else:
                add_rows(summed, at, gradient.to(summed))
        rows_of_weight, mean = resolve(found, summed.div_(world_size).to(weight.dtype))
        gradient = torch.sparse_coo_tensor(
            rows_of_weight.unsqueeze(0),
            mean,
            weight.shape,
            is_coalesced=True,
            check_invariants=False,
        )
        weight.grad = gradient if weight.grad is None else (weight.grad + gradient).coalesce()


def _distinct(places: Tensor, reads: DeferredReads, number: int | None) -> tuple[Tensor, Tensor]:
    """Distinct places, ascending, and the number of each place among them."""
    if places.is_cpu or not places.numel():
        reads.now()
        some, which = distinct(places.cpu().numpy(), number)
        return torch.from_numpy(some).to(places), torch.from_numpy(which).to(places)
    # As `torch.unique`, which would make the host wait a second time.
    ascending, order = places.sort()
    is_new = torch.nn.functional.pad(ascending[1:] != ascending[:-1], (1, 0))
    numbers = is_new.cumsum(0)
    [[last]] = reads.now(numbers[-1:])
    found = places.new_empty(last + 1).scatter_(0, numbers, ascending)
    return found, torch.empty_like(order).scatter_(0, order, numbers)


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
