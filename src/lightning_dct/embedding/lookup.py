"""Look-ups of rows on their owners: in training only changes are sent, both ways; elsewhere exact
rows.

A training look-up requests each distinct row once::

    rank that uses a row (R: its copy, G: its residual)            rank that owns it (E: the row, R: the same copy)

      distinct ids, sorted  ----------------------------------->   D = E - R
      R += sent             <---  all of D if R is outdated  ---   R += sent
      R += sent             <--------  D where |D| >= tau  -----   R += sent
      pool R; the rest of the model runs
      G += dL/dR            ---------  G where |G| >= tau  ---->   the sum over all ranks is E's gradient
      G -= sent
      G of evicted rows     -------  behind the answers  -------   joins that sum

What is below the threshold is sent later. The paper instead sends pooled embeddings and sets the
small ones to zero.

:mod:`lightning_dct.embedding.exact` has the look-ups outside training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_dct.embedding import messages
from lightning_dct.embedding.bags import Bags, DistinctRows, read_bags
from lightning_dct.embedding.collected import FAULT, DeliverRows
from lightning_dct.embedding.exact import ANNOUNCED_EXACT, FINISHED, ExactReader
from lightning_dct.embedding.owners import Int64Array
from lightning_dct.embedding.store import RowStore, add_entries
from lightning_dct.kernels import add_rows
from lightning_dct.traffic import FP32_BYTES, ID_BYTES
from lightning_dct.wire.payload import unpack_payload
from lightning_dct.wire.positions import reading

if TYPE_CHECKING:
    from lightning_dct.embedding.sharded import ShardedEmbeddingBags


class _Requested(NamedTuple):
    """The rows of a request, on the rank that makes it or on the one that answers."""

    rows: RowStore  # the copies: of the rank that has asked, or of its owner
    peer: int
    places: Int64Array  # shape `[k]`: on the owner
    cached: Int64Array  # shape `[k]`: the slots of the copies
    slots: Tensor  # shape `[k]`: the same, where the copies are
    message: messages.Message  # the form of the messages about these rows, in both directions

    @property
    def thresholds(self) -> messages.Float64Array:
        """One for each table; changed in place."""
        return self.rows.thresholds[self.peer]

    def check_not_evicted(self) -> None:
        """Refuse to use copies whose slots other rows have by now (RuntimeError)."""
        cache = self.rows.cache
        if (
            (cache.row_at[self.cached] != self.places) | (cache.peer_at[self.cached] != self.peer)
        ).any():
            raise RuntimeError(
                "Rows were evicted between a request and its backward. If there are several"
                f" requests before a backward, `cache_rows` ({cache.capacity}) must hold the rows"
                " of all requests. Raise it."
            )


# A rank announces to each other: what it has come to; of a request the bytes of ids, look-ups and
# the bytes of the ids of evicted rows, and of the end of a backward which of the last look-ups it
# has reached, as bits.
ANNOUNCED = 4
REQUEST = 0
END = 1
MOST_LOOKUPS = 31


def look_up(
    module: ShardedEmbeddingBags,
    ids: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None = None,
    samples: Sequence[int] | None = None,
) -> ChangesLookup | ExactReader:
    """Start a look-up: of changes if a gradient is wanted, else of exact rows."""
    is_exact = not (module.weight.requires_grad and torch.is_grad_enabled())
    try:
        bags = read_bags(ids, offsets, module.features, weights, samples)
    except (IndexError, TypeError, ValueError) as fault:
        # The others wait for an announcement. With this one they all fail.
        exchange = ((module.evaluated_with or (module,))[0] if is_exact else module).exchange_group
        numbers = np.full((exchange.world_size, ANNOUNCED_EXACT if is_exact else ANNOUNCED), FAULT)
        exchange.announce(numbers, module.traffic, FINISHED if is_exact else REQUEST, fault)
        raise
    if is_exact:
        return ExactReader(module, bags)
    if module.refresh_requested:
        for rows in module.remembered:
            rows.thresholds[:] = 0
        module.refreshed()
    return ChangesLookup(module, bags)


class ChangesLookup:
    """A look-up under way: the constructor requests rows and answers the others, :meth:`pooled`
    waits for answers.

    The owners have added their answers to their copies already. So this rank adds them, too, once
    and in the order of the requests: at the latest when the next request begins.
    """

    def __init__(self, module: ShardedEmbeddingBags, bags: Bags) -> None:
        module.take_answers()
        self._module = module
        self._rank = module.exchange_group.rank
        self._peers = module.exchange_group.peers
        with module.traffic.timed():
            self._rows = DistinctRows(bags, module.placement, module.weight.device)
            payloads, evicted, numbers = self._make_requests()
        announced = _announce(module, numbers)
        sizes = {peer: int(announced[peer, 1] + announced[peer, 3]) for peer in self._peers}
        requests = module.exchange_group.start(payloads, sizes, module.traffic)()
        with module.traffic.timed():
            self._read_requests(requests, announced)
            # The dense exchange has fp32 rows both ways, and the int64 id of every look-up.
            own, others = (int(each[self._peers, 2].sum()) for each in (numbers, announced))
            row_bytes = FP32_BYTES * module.embedding_dim
            module.traffic.add(
                steps=1, bytes_dense=own * (ID_BYTES + row_bytes) + others * row_bytes
            )
            module.note_requests(
                [self._rows.wanted[self._rank], *(one.places for one in self._received.values())]
            )
            answers = {}
            counts = np.zeros((len(numbers), 1), dtype=np.int64)
            for peer, request in self._received.items():
                answers[peer], counts[peer] = self._answer(request)
        # Only the owner knows how many of the rows that are new in a cache are not at their initial
        # values.
        self._num_whole = module.exchange_group.announce(counts, module.traffic)[:, 0].tolist()
        sizes = {peer: sum(self._answer_sizes(peer)) for peer in self._peers}
        # Waits for the answers; None once they are taken.
        self._receive: Callable[[], list[Tensor]] | None = module.exchange_group.start(
            answers, sizes, module.traffic
        )
        self.gradient: Tensor | None = (
            None  # of this rank's loss by its distinct rows, until it is sent
        )
        self._is_returned = False
        module.lookups = [*module.lookups, self][-MOST_LOOKUPS:]
        self._send_evicted(evicted)

    def take_answers(self) -> None:
        """Wait for the answers and add them to the copies, once."""
        if self._receive is None:
            return
        module = self._module
        answers = self._receive()
        self._receive = None
        with module.traffic.timed():
            for peer, request in self._sent.items():
                request.check_not_evicted()
                whole, others = answers[peer].split(self._answer_sizes(peer))
                with reading(f"Embedding rows from rank {peer} of the process group"):
                    self._add_whole(request, whole, self._num_whole[peer])
                    sent = unpack_payload(request.message.layout, others)
                add_entries(request.rows.copies, request.slots, sent.positions, sent.values)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pooled(self) -> Tensor:
        """Wait for the rows and pool them, ``[samples, features, dim]``."""
        bags = self._rows.bags
        if bags.is_one_each:
            # The gradient then comes as it lies, for example a part of a concatenation, and is not
            # copied.
            return DeliverRows.apply(self._module.weight, bags.pool(self._each()), self.reach)
        rows = self.rows()
        with self._module.traffic.timed():
            return bags.pool(rows)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def rows(self) -> Tensor:
        """Wait for the rows, and give that of each look-up, ``[lookups, dim]``."""
        return DeliverRows.apply(self._module.weight, self._each(), self.reach)

    def _each(self) -> Tensor:
        module = self._module
        rows = self._rows
        self.take_answers()
        with module.traffic.timed():
            found = module.weight.new_empty(
                sum(rows.sizes), module.embedding_dim, dtype=module.remembered_dtype
            )
            for rank, part in enumerate(found.split(rows.sizes)):
                if rank == self._rank:
                    part.copy_(module.own_rows(rows.wanted[rank]))
                    continue
                self._sent[rank].check_not_evicted()
                torch.index_select(
                    self._sent[rank].rows.copies, 0, self._sent[rank].slots, out=part
                )
            return found.to(module.weight.dtype).index_select(0, rows.inverse)

    def reach(self, gradient: Tensor) -> None:
        """Note the gradient of the look-ups' rows, ``[..., dim]``, which is sent when backward
        ends.
        """
        module = self._module
        rows = self._rows
        if self not in module.lookups:
            raise RuntimeError(
                f"A backward has come to a look-up before the last {MOST_LOOKUPS}, or one that has"
                " ended."
            )
        with module.traffic.timed():
            each = gradient.to(module.remembered_dtype)
            if self.gradient is None:
                self.gradient = each.new_zeros(sum(rows.sizes), module.embedding_dim)
            add_rows(self.gradient, rows.inverse, each)
        when_backward_ends(module.evaluated_with or (module,))

    def send_gradient(self) -> Callable[[], None]:
        """Start to send each owner the gradient of its rows; the result receives that of this
        rank's.
        """
        module = self._module
        rows = self._rows
        dim = self._module.embedding_dim
        self.take_answers()  # also if this rank has not pooled them
        gradient = self.gradient
        self.gradient = None
        self._is_returned = True
        if gradient is None:  # this rank's loss does not depend on the look-up, another's does
            gradient = module.weight.new_zeros(sum(rows.sizes), dim, dtype=module.remembered_dtype)
        with module.traffic.timed():
            parts = gradient.split(rows.sizes)
            payloads = {
                peer: self._gradient_payload(request, parts[peer])
                for peer, request in self._sent.items()
            }
        expected = {
            peer: request.message.layout.num_bytes for peer, request in self._received.items()
        }
        wait = module.exchange_group.start(payloads, expected, module.traffic)

        def receive() -> None:
            received = wait()
            module.collected.wait()
            with module.traffic.timed():
                own = torch.from_numpy(rows.wanted[self._rank]).to(gradient.device)
                module.collected.add(own, parts[self._rank])
                for peer, request in self._received.items():
                    with reading(f"Embedding rows from rank {peer} of the process group"):
                        sent = unpack_payload(request.message.layout, received[peer])
                    touched, within = torch.unique_consecutive(
                        sent.positions // dim, return_inverse=True
                    )
                    dense = gradient.new_zeros(touched.numel(), dim)
                    dense.view(-1).index_copy_(
                        0, within * dim + sent.positions % dim, sent.values.to(dense.dtype)
                    )
                    module.collected.add(
                        torch.from_numpy(request.places).to(gradient.device)[touched], dense
                    )

        return receive

    def _make_requests(self) -> tuple[dict[int, Tensor], dict[int, Tensor], Int64Array]:
        """The bytes of ids and the residuals of evicted rows, by owner, and the numbers to
        announce.
        """
        module = self._module
        # REQUEST in the first place.
        numbers = np.zeros((module.placement.world_size, ANNOUNCED), dtype=np.int64)
        wanted = {peer: self._rows.wanted[peer] for peer in self._peers}
        ids = {
            peer: module.own_copies.codes[peer].encode(places) for peer, places in wanted.items()
        }
        slots, gone = module.own_copies.admit(wanted)
        payloads = {}
        residuals = {}
        for peer, (places, residual) in gone.items():
            # Most requests evict nothing, and then say so in no byte.
            evicted = module.own_copies.codes[peer].encode(places) if places.size else ids[peer][:0]
            payloads[peer] = torch.cat([ids[peer], evicted]).to(module.weight.device)
            residuals[peer] = messages.encode_whole(residual, module.value_format)
            numbers[peer, 1:] = ids[peer].numel(), self._rows.lookups[peer], evicted.numel()
        module.own_copies.learn()
        # By owner, the requests of this rank.
        self._sent = {
            peer: self._requested(module.own_copies, peer, peer, wanted[peer], slots[peer])
            for peer in wanted
        }
        return payloads, residuals, numbers

    def _read_requests(self, requests: Sequence[Tensor], announced: Int64Array) -> None:
        """Forget what the other ranks have evicted, and remember what they request."""
        module = self._module
        wanted: dict[int, Int64Array] = {}
        # By user, the rows that it has evicted.
        self._evicted: dict[int, Int64Array] = {}
        for peer in self._peers:
            code, (_, num_bytes, lookups, _) = (
                module.peer_copies.codes[peer],
                announced[peer].tolist(),
            )
            with reading(f"Rank {peer} of the process group"):
                wanted[peer] = code.decode(requests[peer][:num_bytes], lookups)
                evicted = requests[peer][num_bytes:]
                held = len(module.peer_copies.cache)
                self._evicted[peer] = (
                    code.decode(evicted, held) if evicted.numel() else wanted[peer][:0]
                )
            module.peer_copies.release(peer, self._evicted[peer])
        slots, _ = module.peer_copies.admit(wanted)
        module.peer_copies.learn()
        # By user, the requests that this rank has received.
        self._received = {
            peer: self._requested(module.peer_copies, peer, self._rank, places, slots[peer])
            for peer, places in wanted.items()
        }

    def _requested(
        self, rows: RowStore, peer: int, owner: int, places: Int64Array, cached: Int64Array
    ) -> _Requested:
        module = self._module
        tables = module.placement.tables_of(owner, places)
        message = messages.message_about(
            tables, module.embedding_dim, module.density, module.value_format
        )
        return _Requested(
            rows, peer, places, cached, torch.from_numpy(cached).to(module.weight.device), message
        )

    def _send_evicted(self, payloads: Mapping[int, Tensor]) -> None:
        """Start to send the residuals of evicted rows, which are not needed before backward ends.

        They are sent after the answers, which pooling waits for, because they can be many times as
        long.
        """
        module = self._module
        dim = self._module.embedding_dim
        value_format = self._module.value_format
        sizes = {
            peer: messages.whole_num_bytes(places.size, dim, value_format)
            for peer, places in self._evicted.items()
        }
        evicted = self._evicted
        wait = module.exchange_group.start(payloads, sizes, module.traffic)

        def arrive() -> Iterator[tuple[Tensor, Tensor]]:
            received = wait()
            for peer, places in evicted.items():
                if places.size:
                    with module.traffic.timed():
                        rows = messages.decode_whole(received[peer], places.size, dim, value_format)
                    if rows.any():  # not of look-ups without a backward
                        yield (
                            torch.from_numpy(places).to(rows.device),
                            rows.to(module.remembered_dtype),
                        )

        module.collected.expect(arrive())

    def _answer(self, request: _Requested) -> tuple[Tensor, int]:
        """The bytes for a rank, of whole rows and then of changes, and the number of whole rows."""
        module = self._module
        mirror = request.rows
        slots = request.slots
        now = module.own_rows(request.places).to(module.remembered_dtype)
        known = mirror.copies.index_select(0, slots)
        outdated = (now != known).any(dim=1) & mirror.take_outdated(slots)
        whole, count = messages.encode_some(now, known, outdated, request.message)
        self._add_whole(request, whole, count)
        known = mirror.copies.index_select(0, slots)
        sent = messages.compress_changes(now, known, request.message, request.thresholds, scale=-1)
        add_entries(mirror.copies, slots, sent.positions, sent.received)
        num_sent = count * module.embedding_dim + sent.positions.numel()
        module.traffic.add(entries_sent=num_sent, entries=now.numel())
        return torch.cat([whole, sent.payload]), count

    def _add_whole(self, request: _Requested, payload: Tensor, count: int) -> None:
        """Add the whole rows of an answer to the copies of the requested rows."""
        some, values = messages.decode_some(payload, count, request.message)
        copies = request.rows.copies
        slots = request.slots[some]
        copies.index_copy_(
            0, slots, messages.finite(copies.index_select(0, slots)) + values.to(copies)
        )

    def _answer_sizes(self, owner: int) -> list[int]:
        """The bytes of the two parts of an owner's answer."""
        message = self._sent[owner].message
        return [message.some_num_bytes(self._num_whole[owner]), message.layout.num_bytes]

    def _gradient_payload(self, request: _Requested, gradient: Tensor) -> Tensor:
        request.check_not_evicted()
        rows = request.rows.residual.index_select(0, request.slots)
        sent = messages.compress_changes(rows, gradient, request.message, request.thresholds)
        flat = rows.view(-1)
        left = torch.where(sent.left.isfinite(), sent.left, flat.index_select(0, sent.positions))
        request.rows.residual.index_copy_(
            0, request.slots, flat.index_copy_(0, sent.positions, left).view_as(rows)
        )
        self._module.traffic.add(entries_sent=sent.positions.numel(), entries=gradient.numel())
        return sent.payload


def when_backward_ends(modules: Sequence[ShardedEmbeddingBags]) -> None:
    """Exchange the gradients of all of a model's tables once, after the rest of this backward;
    every rank calls it.
    """
    this_backward = torch._C._current_graph_task_id()
    if modules[0].collected.ended_by != this_backward:
        modules[0].collected.ended_by = this_backward
        torch.autograd.Variable._execution_engine.queue_callback(partial(_end_backward, modules))


def _end_backward(modules: Sequence[ShardedEmbeddingBags]) -> None:
    """Exchange the gradients of all look-ups that some rank's backward has reached."""
    for module in modules:
        if not module.weight.requires_grad:
            continue
        bits = sum(
            1 << place
            for place, one in enumerate(reversed(module.lookups))
            if one.gradient is not None
        )
        numbers = np.tile(np.array([END, bits, 0, 0]), (module.placement.world_size, 1))
        reached = int(np.bitwise_or.reduce(_announce(module, numbers)[:, 1]))
        due = [one for place, one in enumerate(reversed(module.lookups)) if reached >> place & 1][
            ::-1
        ]
        # What was sent in an earlier backward stays only if this one has come to it again.
        module.lookups = [one for one in module.lookups if one in due or not one._is_returned]
        for receive in [one.send_gradient() for one in due]:
            receive()
        if due:
            with module.traffic.timed():
                _refuse_dense_gradient(module)
                module.collected.deliver(module.weight, module.placement.world_size, module.resolve)


def _refuse_dense_gradient(module: ShardedEmbeddingBags) -> None:
    """Refuse a dense gradient of all rows, such as that of a penalty on them (RuntimeError)."""
    gradient = module.weight.grad
    if gradient is not None and gradient.layout == torch.strided:
        raise RuntimeError(
            f"The rows of {module.name!r} have a dense gradient, as of an L2 penalty over"
            " `model.parameters()`, and look-ups give them sparse ones. Leave"
            f" `{module.name}.weight` out of the penalty. To keep rows small, penalise those that a"
            " batch looks up: `pooled.square().sum()` of what the look-up gives."
        )


def _announce(module: ShardedEmbeddingBags, numbers: Int64Array) -> Int64Array:
    """Announce numbers, and refuse ranks that are at different collectives (RuntimeError, on every
    rank).
    """
    announced = module.exchange_group.announce(numbers, module.traffic)
    if (apart := announced[:, 0] != numbers[0, 0]).any():
        raise RuntimeError(
            f"Rank {apart.argmax()} of the process group and this one have called {module.name!r} a"
            " different number of times in this step. In each training step all ranks must look up"
            " the tables equally often. A rank without ids gives an empty batch."
        )
    return announced
