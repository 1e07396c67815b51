"""One training look-up: the rank requests each distinct row once, and only changes are sent, both ways.

    rank that uses a row (R: its copy, G: its residual)            rank that owns it (E: the row, R: the same copy)

      distinct ids, sorted  ----------------------------------->   D = E - R
      R += sent             <---  all of D if R is outdated  ---   R += sent
      R += sent             <--------  D where |D| >= tau  -----   R += sent
      pool R; the rest of the model runs
      G += dL/dR            ---------  G where |G| >= tau  ---->   the sum over all ranks is E's gradient
      G -= sent
      G of evicted rows     -------  behind the answers  -------   joins that sum

What is below the threshold is sent later. The paper instead sends pooled embeddings and sets the small ones to zero.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_dct.embedding import changes
from lightning_dct.embedding.bags import Bags
from lightning_dct.embedding.cache import RememberedRows, add_entries
from lightning_dct.embedding.collected import Incoming
from lightning_dct.embedding.owners import Int64Array
from lightning_dct.embedding.row_gradients import DeliverRows, when_backward_ends
from lightning_dct.embedding.state import TableState
from lightning_dct.kernels import add_rows
from lightning_dct.traffic import FP32_BYTES, ID_BYTES
from lightning_dct.wire.payload import unpack
from lightning_dct.wire.positions import PayloadError, reading


class DistinctRows:
    """The distinct rows of some bags, by owner.

    Attributes:
        bags: The look-ups.
        wanted: For each owner, the places there: ascending, distinct.
        lookups: For each owner, the number of look-ups of these rows.
        inverse: Shape ``[lookups]``, int64: the distinct row of each look-up, counted through all owners.
    """

    def __init__(self, bags: Bags, module: TableState) -> None:
        placement = module.placement
        owners, places = placement.locate(bags.tables, bags.rows)
        inverse = np.empty(places.size, dtype=np.int64)
        self.bags = bags
        self.wanted: list[Int64Array] = []
        start = 0
        # Owner by owner, because keys of growing tables leave no bits for the owner.
        for rank in range(placement.world_size):
            here = np.flatnonzero(owners == rank)
            wanted, which = np.unique(places[here], return_inverse=True)
            inverse[here] = start + which.reshape(-1)
            start += wanted.size
            self.wanted.append(wanted)
        self.lookups = np.bincount(owners, minlength=placement.world_size)
        self.inverse = torch.from_numpy(inverse).to(module.weight.device)


class Request(NamedTuple):
    """A request that this rank has received."""

    places: Int64Array  # shape `[k]`: the requested rows
    slots: Tensor  # shape `[k]`: the slots of their copies in the mirror
    evicted: Int64Array  # shape `[e]`: the rows that the requesting rank has evicted, whose residuals follow
    message: changes.Message  # the form of the messages about these rows, in both directions


# A rank announces to each other: what it has come to; of a request the bytes of ids, look-ups and evicted rows,
# and of the end of a backward which of the last look-ups it has reached, as bits.
ANNOUNCED = 4
REQUEST, END = 0, 1
MOST_LOOKUPS = 31


class ChangesLookup:
    """A look-up under way: the constructor requests rows and answers the others, :meth:`pooled` waits for answers.

    The owners have added their answers to their copies already. So this rank adds them, too, once and in the order of
    the requests: at the latest when the next request begins.
    """

    def __init__(self, module: TableState, bags: Bags) -> None:
        if module.latest_lookup is not None:
            module.latest_lookup.take_answers()
        self._module = module
        self._rank, self._peers = module.exchange_group.rank, module.peers
        with module.traffic.timed():
            self._rows = DistinctRows(bags, module)
            payloads, evicted, numbers = self._make_requests()
        announced = _announce(module, numbers)
        sizes = dict(enumerate(announced[:, 1].tolist()))
        requests = module.exchange_group.start(payloads, sizes, module.traffic).wait()
        with module.traffic.timed():
            self._requests = {
                peer: self._read_request(peer, requests[peer], *announced[peer, 2:].tolist()) for peer in self._peers
            }
            # The dense exchange has fp32 rows both ways, and the int64 id of every look-up.
            own, others = (int(each[self._peers, 2].sum()) for each in (numbers, announced))
            row_bytes = FP32_BYTES * module.embedding_dim
            module.traffic.add(steps=1, bytes_dense=own * (ID_BYTES + row_bytes) + others * row_bytes)
            module.note_requests([self._rows.wanted[self._rank], *(r.places for r in self._requests.values())])
            # Message forms of the requests this rank has sent; `_requests` has those of the requests it received.
            self._messages = {peer: self._message(peer, self._rows.wanted[peer]) for peer in self._peers}
            answers = {}
            counts = np.zeros((len(numbers), 1), dtype=np.int64)
            for peer in self._peers:
                answers[peer], counts[peer] = self._answer(peer)
        # Only the owner knows how many of the rows that are new in a cache are not at their initial values.
        self._num_whole = module.exchange_group.announce(counts, module.traffic)[:, 0].tolist()
        sizes = {peer: sum(self._answer_sizes(peer)) for peer in self._peers}
        self._incoming: Incoming | None = module.exchange_group.start(answers, sizes, module.traffic)
        self.gradient: Tensor | None = None  # of this rank's loss by its distinct rows, until it is sent
        self._is_returned = False
        module.latest_lookup = self
        module.lookups = [*module.lookups, self][-MOST_LOOKUPS:]
        self._send_evicted(evicted)

    def take_answers(self) -> None:
        """Wait for the answers and add them to the copies, once."""
        if self._incoming is None:
            return
        module = self._module
        answers, self._incoming, module.latest_lookup = self._incoming.wait(), None, None
        with module.traffic.timed():
            for peer in self._peers:
                held, slots = self._held(peer)
                whole, others = answers[peer].split(self._answer_sizes(peer))
                with reading(f"Embedding rows from rank {peer} of the process group"):
                    self._add_whole(held, slots, whole, self._num_whole[peer])
                add_entries(held.copies, slots, *self._read(peer, others, self._messages[peer]))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pooled(self) -> Tensor:
        """Wait for the rows and pool them, ``[samples, tables, dim]``."""
        module, rows = self._module, self._rows
        self.take_answers()
        with module.traffic.timed():
            sizes = [wanted.size for wanted in rows.wanted]
            found = module.weight.new_empty(sum(sizes), module.embedding_dim, dtype=module.remembered_dtype)
            for rank, part in enumerate(found.split(sizes)):
                if rank == self._rank:
                    part.copy_(module.own_rows(rows.wanted[rank]))
                    continue
                held, slots = self._held(rank)
                torch.index_select(held.copies, 0, slots, out=part)
            pooled = rows.bags.pool(found.to(module.weight.dtype).index_select(0, rows.inverse))
        return DeliverRows.apply(module.weight, pooled, self.reach)

    def reach(self, pooled_gradient: Tensor) -> None:
        """Note the gradient of pooled rows, which is sent when backward ends."""
        module, rows = self._module, self._rows
        if self not in module.lookups:
            raise RuntimeError(
                f"A backward has come to a look-up before the last {MOST_LOOKUPS}, or one that has ended."
            )
        with module.traffic.timed():
            each = rows.bags.spread(pooled_gradient).to(module.remembered_dtype)
            if self.gradient is None:
                self.gradient = each.new_zeros(sum(wanted.size for wanted in rows.wanted), module.embedding_dim)
            add_rows(self.gradient, rows.inverse, each)
        modules = module.evaluated_with or (module,)
        when_backward_ends(modules[0].collected, partial(end_backward, modules))

    def send_gradient(self) -> Callable[[], None]:
        """Start to send each owner the gradient of its rows; the result receives that of this rank's."""
        module, rows, dim = self._module, self._rows, self._module.embedding_dim
        sizes = [wanted.size for wanted in rows.wanted]
        gradient, self.gradient, self._is_returned = self.gradient, None, True
        if gradient is None:  # this rank's loss does not depend on the look-up, another's does
            gradient = module.weight.new_zeros(sum(sizes), dim, dtype=module.remembered_dtype)
        with module.traffic.timed():
            parts = gradient.split(sizes)
            payloads = {peer: self._gradient_payload(peer, parts[peer]) for peer in self._peers}
        expected = {peer: request.message.layout.num_bytes for peer, request in self._requests.items()}
        incoming = module.exchange_group.start(payloads, expected, module.traffic)

        def receive() -> None:
            received = incoming.wait()
            module.collected.wait()
            with module.traffic.timed():
                own = torch.from_numpy(rows.wanted[self._rank]).to(gradient.device)
                module.collected.add(own, parts[self._rank])
                for peer, request in self._requests.items():
                    positions, values = self._read(peer, received[peer], request.message)
                    touched, within = torch.unique_consecutive(positions // dim, return_inverse=True)
                    dense = gradient.new_zeros(touched.numel(), dim)
                    dense.view(-1).index_copy_(0, within * dim + positions % dim, values.to(dense.dtype))
                    module.collected.add(torch.from_numpy(request.places).to(gradient.device)[touched], dense)

        return receive

    def _make_requests(self) -> tuple[dict[int, Tensor], dict[int, Tensor], Int64Array]:
        """The bytes of ids and the residuals of evicted rows, by owner, and the numbers to announce."""
        module, device = self._module, self._module.weight.device
        numbers = np.zeros((module.placement.world_size, ANNOUNCED), dtype=np.int64)  # REQUEST in the first place
        payloads, evicted = {}, {}
        self._slots: dict[int, Tensor] = {}
        self._admitted: dict[int, Int64Array] = {}  # the same for the host
        for peer in self._peers:
            wanted = self._rows.wanted[peer]
            payloads[peer] = module.held[peer].code.encode(wanted).to(device)
            admission, residuals = module.held[peer].admit(wanted)
            self._slots[peer], self._admitted[peer] = torch.from_numpy(admission.slots).to(device), admission.slots
            evicted[peer] = changes.encode_whole(residuals, module.value_format)
            numbers[peer, 1:] = payloads[peer].numel(), self._rows.lookups[peer], len(residuals)
        return payloads, evicted, numbers

    def _read_request(self, peer: int, data: Tensor, lookups: int, evicted: int) -> Request:
        module = self._module
        with reading(f"Rank {peer} of the process group"):
            places = module.mirrors[peer].code.decode(data, lookups)
        # Both ends compute the same evictions.
        admission, _ = module.mirrors[peer].admit(places)
        if evicted != admission.evicted.size:
            raise PayloadError(
                f"Rank {peer} has evicted {evicted} rows where {admission.evicted.size} were expected: the two"
                " ends' caches differ. Use the same `cache_rows` and the same checkpoint on every rank."
            )
        slots = torch.from_numpy(admission.slots).to(module.weight.device)
        return Request(places, slots, admission.evicted, self._message(self._rank, places))

    def _send_evicted(self, payloads: Mapping[int, Tensor]) -> None:
        """Start to send the residuals of evicted rows, which are not needed before backward ends.

        They are sent after the answers, which pooling waits for, because they can be many times as long.
        """
        module, dim, value_format = self._module, self._module.embedding_dim, self._module.value_format
        evicted = {peer: request.evicted for peer, request in self._requests.items()}
        sizes = {peer: changes.whole_num_bytes(places.size, dim, value_format) for peer, places in evicted.items()}
        incoming = module.exchange_group.start(payloads, sizes, module.traffic)

        def arrive() -> Iterator[tuple[Tensor, Tensor]]:
            received = incoming.wait()
            for peer, places in evicted.items():
                if places.size:
                    with module.traffic.timed():
                        rows = changes.decode_whole(received[peer], places.size, dim, value_format)
                    if rows.any():  # not of look-ups without a backward
                        yield torch.from_numpy(places).to(rows.device), rows.to(module.remembered_dtype)

        module.collected.expect(arrive)

    def _answer(self, peer: int) -> tuple[Tensor, int]:
        """The bytes for a rank, of whole rows and then of changes, and the number of whole rows."""
        module = self._module
        request, mirror = self._requests[peer], module.mirrors[peer]
        now = module.own_rows(request.places).to(module.remembered_dtype)
        missed = now - mirror.copies.index_select(0, request.slots)
        outdated = (missed != 0).any(dim=1) & mirror.take_outdated(request.slots)
        whole, count = changes.encode_some(missed, outdated, module.value_format)
        self._add_whole(mirror, request.slots, whole, count)
        known = mirror.copies.index_select(0, request.slots)
        sent = changes.compress_changes(now, known, request.message, mirror.thresholds, scale=-1)
        add_entries(mirror.copies, request.slots, sent.positions, sent.received)
        num_sent = count * module.embedding_dim + sent.positions.numel()
        module.traffic.add(entries_sent=num_sent, entries=now.numel())
        return torch.cat([whole, sent.payload]), count

    def _add_whole(self, rows: RememberedRows, slots: Tensor, payload: Tensor, count: int) -> None:
        """Add the whole rows of an answer to the copies of the requested rows."""
        some, values = changes.decode_some(
            payload, count, len(slots), self._module.embedding_dim, self._module.value_format
        )
        rows.copies.index_add_(0, slots[some], values.to(rows.copies))

    def _answer_sizes(self, owner: int) -> list[int]:
        """The bytes of the two parts of an owner's answer."""
        module, message = self._module, self._messages[owner]
        num_rows, count = len(self._slots[owner]), self._num_whole[owner]
        whole = changes.some_num_bytes(count, num_rows, module.embedding_dim, module.value_format)
        return [whole, message.layout.num_bytes]

    def _gradient_payload(self, owner: int, gradient: Tensor) -> Tensor:
        module = self._module
        held, slots = self._held(owner)
        rows = held.residual.index_select(0, slots)
        sent = changes.compress_changes(rows, gradient, self._messages[owner], held.thresholds)
        flat = rows.view(-1)
        left = torch.where(sent.left.isfinite(), sent.left, flat.index_select(0, sent.positions))
        held.residual.index_copy_(0, slots, flat.index_copy_(0, sent.positions, left).view_as(rows))
        module.traffic.add(entries_sent=sent.positions.numel(), entries=gradient.numel())
        return sent.payload

    def _held(self, owner: int) -> tuple[RememberedRows, Tensor]:
        """This rank's copies of an owner's rows, and the slots of this look-up's rows."""
        held, slots = self._module.held[owner], self._slots[owner]
        if (held.cache.row_at[self._admitted[owner]] != self._rows.wanted[owner]).any():
            raise RuntimeError(
                "Rows were evicted between a request and its backward. If there are several requests before a backward,"
                f" `cache_rows` ({self._module.cache_rows}) must hold the rows of all requests. Raise it."
            )
        return held, slots

    def _message(self, owner: int, places: Int64Array) -> changes.Message:
        module = self._module
        tables = module.placement.tables_of(owner, places)
        return changes.message_about(tables, module.embedding_dim, module.density, module.value_format)

    def _read(self, peer: int, payload: Tensor, message: changes.Message) -> tuple[Tensor, Tensor]:
        with reading(f"Embedding rows from rank {peer} of the process group"):
            unpacked = unpack(message.layout, payload)
        return unpacked.positions, unpacked.values


def end_backward(modules: Sequence[TableState]) -> None:
    """Exchange the gradients of all look-ups that some rank's backward has reached; every rank calls it."""
    for module in modules:
        if not module.weight.requires_grad:
            continue
        bits = sum(1 << place for place, one in enumerate(reversed(module.lookups)) if one.gradient is not None)
        numbers = np.tile(np.array([END, bits, 0, 0]), (module.placement.world_size, 1))
        reached = int(np.bitwise_or.reduce(_announce(module, numbers)[:, 1]))
        due = [one for place, one in enumerate(reversed(module.lookups)) if reached >> place & 1][::-1]
        # What was sent in an earlier backward stays only if this one has come to it again.
        module.lookups = [one for one in module.lookups if one in due or not one._is_returned]
        for receive in [one.send_gradient() for one in due]:
            receive()
        if due:
            with module.traffic.timed():
                module.collected.deliver(module.weight, module.placement.world_size, module.resolve)


def _announce(module: TableState, numbers: Int64Array) -> Int64Array:
    """Announce numbers, and refuse ranks that have not come to the same (RuntimeError, on every rank)."""
    announced = module.exchange_group.announce(numbers, module.traffic)
    if (apart := announced[:, 0] != numbers[0, 0]).any():
        raise RuntimeError(
            f"Some ranks look up rows of {module.name!r} where others have ended a backward: rank {apart.argmax()} of"
            " the process group and this one differ. In each training step all ranks must look up the tables equally"
            " often. A rank without ids gives an empty batch."
        )
    return announced
