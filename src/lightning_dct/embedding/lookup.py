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
      G of evicted rows     ------  with that  ------------------->   joins that sum

So a step makes three collectives, one for each direction above. Only the sender knows how long its
ids are, how many rows it sends whole, and which look-ups its loss has reached; :mod:`.first_parts`
says how such messages are sent.

What is below the threshold is sent later. The paper instead sends pooled embeddings and sets the
small ones to zero.

:mod:`lightning_dct.embedding.exact` has the look-ups outside training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_dct.embedding import messages
from lightning_dct.embedding.bags import Bags, DistinctRows, read_bags
from lightning_dct.embedding.collected import FAULT, DeliverRows
from lightning_dct.embedding.exact import ANNOUNCED_EXACT, FINISHED, ExactReader
from lightning_dct.embedding.first_parts import (
    HAS_REST,
    HEAD_BYTES,
    FirstParts,
    read_head,
    write_head,
)
from lightning_dct.embedding.on_device import Reading, together
from lightning_dct.embedding.owners import Int64Array
from lightning_dct.embedding.store import RowStore, add_entries
from lightning_dct.kernels import add_rows
from lightning_dct.traffic import FP32_BYTES, ID_BYTES
from lightning_dct.wire.payload import HEADER
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


# The kinds of heads. That of a request has the bytes of ids, look-ups and the bytes of the ids of
# evicted rows, that of an answer the number of whole rows, and that of the end of a backward which
# of the last look-ups it has reached, as bits. A rank whose batch is wrong sends another one.
REQUEST = 0
ANSWER = 1
END = 2
WRONG_BATCH = 3
MOST_LOOKUPS = 31
GRADIENTS = "gradients"
# Look-ups whose evicted rows wait for a backward.
MOST_WAITING = 16


class EvictedRows(NamedTuple):
    """Of one look-up, the rows that have left caches, whose residuals wait for a backward."""

    sent: dict[int, Tensor]  # by owner, the residuals of this rank as bytes
    expected: dict[int, Int64Array]  # by user, the places of the rows that it has evicted

    def on(self, device: torch.device) -> EvictedRows:
        """The same, with the bytes on a device."""
        return self._replace(sent={peer: data.to(device) for peer, data in self.sent.items()})

    def sizes(self, dim: int, value_format: str) -> dict[int, int]:
        """The bytes that each user sends."""
        return {
            peer: messages.whole_num_bytes(places.size, dim, value_format)
            for peer, places in self.expected.items()
        }


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
        # The others wait for a message. With this one they all fail.
        if is_exact:
            exchange = (module.evaluated_with or (module,))[0].exchange_group
            numbers = np.full((exchange.world_size, ANNOUNCED_EXACT), FAULT)
            exchange.announce(numbers, module.traffic, FINISHED, fault)
        elif module.exchange_group.peers:
            module.take_answers()
            heads = dict.fromkeys(module.exchange_group.peers, bytes([WRONG_BATCH]))
            _check_kinds(module, _start_requests(module, heads, {}).wait(), REQUEST, fault)
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
        self.is_new = True  # until a backward ends
        with module.traffic.timed():
            self._rows = DistinctRows(bags, module.placement, module.weight.device)
            heads, ids, evicted = self._make_requests()
        transfer = _start_requests(module, heads, ids)
        found = transfer.wait()
        _check_kinds(module, found, REQUEST)
        numbers = {peer: self._read(peer, head, 3) for peer, head in found.items()}
        lengths = {peer: size + ids + gone for peer, ((ids, _, gone), size) in numbers.items()}
        requests = transfer.complete(lengths)
        for peer in self._peers:
            module.rooms.sent_ids[peer].note(transfer.lengths[peer])
            module.rooms.received_ids[peer].note(lengths[peer])
        with module.traffic.timed():
            self._read_requests(requests, numbers)
            # The dense exchange has fp32 rows both ways, and the int64 id of every look-up.
            own = int(self._rows.lookups[self._peers].sum())
            others = sum(lookups for (_, lookups, _), _ in numbers.values())
            row_bytes = FP32_BYTES * module.embedding_dim
            module.traffic.add(
                steps=1, bytes_dense=own * (ID_BYTES + row_bytes) + others * row_bytes
            )
            module.note_requests(
                [self._rows.wanted[self._rank], *(one.places for one in self._received.values())]
            )
        # The answers under way; None once they are taken.
        self._answers: FirstParts | None = self._start_answers()
        self.gradient: Tensor | None = (
            None  # of this rank's loss by its distinct rows, until it is sent
        )
        self.is_returned = False
        module.lookups = [*module.lookups, self][-MOST_LOOKUPS:]
        module.evicted.append(EvictedRows(evicted, self._evicted))
        if len(module.evicted) > MOST_WAITING:
            send_evicted(module)

    def _read(self, peer: int, head: bytes, how_many: int) -> tuple[list[int], int]:
        with reading(f"Rank {peer} of the process group"):
            return read_head(head, how_many)

    def _start_answers(self) -> FirstParts:
        """Answer the others: changes, whose bytes both ends know, and whole rows."""
        module = self._module
        rooms = module.rooms
        heads = {}
        answers = {}
        sizes = {}
        with module.traffic.timed():
            parts = together({peer: self._answer(one) for peer, one in self._received.items()})
            for peer, (whole, changes, count) in parts.items():
                heads[peer] = write_head(ANSWER, [count])
                answers[peer] = [changes, whole]
                sizes[peer] = changes.numel() + rooms.sent_rows[peer].size(changes.numel())
                rooms.sent_rows[peer].note(len(heads[peer]) + whole.numel())
            expected = {}
            for peer, request in self._sent.items():
                known = request.message.layout.num_bytes
                expected[peer] = known + rooms.received_rows[peer].size(known)
        return FirstParts(
            module.exchange_group, "rows", heads, answers, sizes, expected, expected, module.traffic
        )

    def take_answers(self) -> None:
        """Wait for the answers and add them to the copies, once."""
        if self._answers is None:
            return
        module = self._module
        transfer = self._answers
        self._answers = None
        found = transfer.wait()
        heads = {peer: self._read(peer, head, 1) for peer, head in found.items()}
        lengths = {}
        for peer, ([count], size) in heads.items():
            message = self._sent[peer].message
            with reading(f"Rank {peer} of the process group"):
                lengths[peer] = size + message.some_num_bytes(count)
            module.rooms.received_rows[peer].note(lengths[peer])
            lengths[peer] += message.layout.num_bytes
        answers = transfer.complete(lengths)
        with module.traffic.timed():
            together(
                {
                    peer: self._take_answer(peer, answers[peer], *heads[peer], found[peer])
                    for peer in self._sent
                }
            )

    def _take_answer(
        self, owner: int, answer: Tensor, numbers: list[int], start: int, read: bytes
    ) -> Reading[None]:
        """Add an answer, of which ``read`` are the first bytes, to the copies."""
        request = self._sent[owner]
        request.check_not_evicted()
        known = request.message.layout.num_bytes
        _, others, whole = answer.tensor_split([start, start + known])
        with reading(f"Embedding rows from rank {owner} of the process group"):
            places, rows, positions, values = yield from messages.read_answer(
                request.message, whole, numbers[0], others, header_at(read, start)
            )
        self._add_whole(request, places, rows)
        add_entries(request.rows.copies, request.slots, positions, values)

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

    def gradient_sizes(self, of_owners: bool) -> dict[int, int]:
        """The bytes of the gradient's messages: to owners, or from users of this rank's rows."""
        requests = self._sent if of_owners else self._received
        return {peer: one.message.layout.num_bytes for peer, one in requests.items()}

    def gradient_payloads(self) -> dict[int, Tensor]:
        """By owner, the gradient of its rows as bytes. What is not sent joins the residuals."""
        module = self._module
        rows = self._rows
        gradient = self.gradient
        self.gradient = None
        self.is_returned = True
        if gradient is None:  # this rank's loss does not depend on the look-up, another's does
            gradient = module.weight.new_zeros(
                sum(rows.sizes), module.embedding_dim, dtype=module.remembered_dtype
            )
        parts = gradient.split(rows.sizes)
        self._own_gradient = parts[self._rank]
        return together(
            {
                peer: self._gradient_payload(request, parts[peer])
                for peer, request in self._sent.items()
            }
        )

    def collect(self, payloads: Mapping[int, Tensor], headers: Mapping[int, bytes | None]) -> None:
        """Collect the gradient of this rank's rows: its own, and what each user has sent.

        ``headers`` are those of payloads that the host has read already.
        """
        module = self._module
        dim = module.embedding_dim
        gradient = self._own_gradient
        del self._own_gradient
        own = torch.from_numpy(self._rows.wanted[self._rank]).to(gradient.device)
        module.collected.add(own, gradient)
        arrived = together(
            {
                peer: self._read_gradient(peer, payloads[peer], headers.get(peer))
                for peer in self._received
            }
        )
        if not arrived:
            return
        places = [torch.from_numpy(one.places) for one in self._received.values()]
        ends = accumulate([one.numel() for one in places], initial=0)
        starts = dict(zip(self._received, ends, strict=False))
        # Numbers through the rows of all users, one after the other.
        rows = torch.cat([at // dim + starts[peer] for peer, (at, _) in arrived.items()])
        within = torch.cat([at % dim for at, _ in arrived.values()])
        values = torch.cat([part for _, part in arrived.values()])
        touched, numbers = torch.unique_consecutive(rows, return_inverse=True)
        dense = gradient.new_zeros(touched.numel(), dim)
        dense.view(-1).index_copy_(0, numbers * dim + within, values.to(dense.dtype))
        module.collected.add(torch.cat(places).to(gradient.device)[touched], dense)

    def _read_gradient(
        self, user: int, payload: Tensor, header: bytes | None
    ) -> Reading[tuple[Tensor, Tensor]]:
        with reading(f"Embedding rows from rank {user} of the process group"):
            return (yield from messages.read_changes(self._received[user].message, payload, header))

    def _make_requests(self) -> tuple[dict[int, bytes], dict[int, list[Tensor]], dict[int, Tensor]]:
        """By owner: a head, the bytes of ids and those of evicted rows, and their residuals."""
        module = self._module
        wanted = {peer: self._rows.wanted[peer] for peer in self._peers}
        ids = {
            peer: module.own_copies.codes[peer].encode(places) for peer, places in wanted.items()
        }
        slots, gone = module.own_copies.admit(wanted)
        heads = {}
        payloads = {}
        residuals = {}
        for peer, (places, residual) in gone.items():
            # Most requests evict nothing, and then say so in no byte.
            evicted = module.own_copies.codes[peer].encode(places) if places.size else ids[peer][:0]
            payloads[peer] = [ids[peer], evicted]
            residuals[peer] = messages.encode_whole(residual, module.value_format)
            lookups = int(self._rows.lookups[peer])
            heads[peer] = write_head(REQUEST, [ids[peer].numel(), lookups, evicted.numel()])
        module.own_copies.learn()
        # By owner, the requests of this rank.
        self._sent = {
            peer: self._requested(module.own_copies, peer, peer, wanted[peer], slots[peer])
            for peer in wanted
        }
        return heads, payloads, residuals

    def _read_requests(
        self, requests: Mapping[int, Tensor], numbers: Mapping[int, tuple[list[int], int]]
    ) -> None:
        """Forget what the other ranks have evicted, and remember what they request."""
        module = self._module
        wanted: dict[int, Int64Array] = {}
        # By user, the rows that it has evicted.
        self._evicted: dict[int, Int64Array] = {}
        for peer in self._peers:
            code = module.peer_copies.codes[peer]
            (num_bytes, lookups, _), start = numbers[peer]
            _, ids, evicted = requests[peer].tensor_split([start, start + num_bytes])
            with reading(f"Rank {peer} of the process group"):
                wanted[peer] = code.decode(ids, lookups)
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

    def _answer(self, request: _Requested) -> Reading[tuple[Tensor, Tensor, int]]:
        """The bytes for a rank, of whole rows and of changes, and the number of whole rows."""
        module = self._module
        mirror = request.rows
        slots = request.slots
        now = module.own_rows(request.places).to(module.remembered_dtype)
        known = mirror.copies.index_select(0, slots)
        outdated = (now != known).any(dim=1) & mirror.take_outdated(slots)
        whole, places, rows = yield from messages.encode_some(now, known, outdated, request.message)
        self._add_whole(request, places, rows)
        known = mirror.copies.index_select(0, slots)
        sent = yield from messages.compress_changes(
            now, known, request.message, request.thresholds, scale=-1
        )
        add_entries(mirror.copies, slots, sent.positions, sent.received)
        count = len(places)
        num_sent = count * module.embedding_dim + sent.positions.numel()
        module.traffic.add(entries_sent=num_sent, entries=now.numel())
        return whole, sent.payload, count

    def _add_whole(self, request: _Requested, places: Tensor, values: Tensor) -> None:
        """Add whole rows, ``[count, dim]``, to the copies of the requested rows at some places."""
        copies = request.rows.copies
        slots = request.slots.index_select(0, places)
        copies.index_copy_(
            0, slots, messages.finite(copies.index_select(0, slots)) + values.to(copies)
        )

    def _gradient_payload(self, request: _Requested, gradient: Tensor) -> Reading[Tensor]:
        request.check_not_evicted()
        rows = request.rows.residual.index_select(0, request.slots)
        sent = yield from messages.compress_changes(
            rows, gradient, request.message, request.thresholds
        )
        flat = rows.view(-1)
        left = torch.where(sent.left.isfinite(), sent.left, flat.index_select(0, sent.positions))
        request.rows.residual.index_copy_(
            0, request.slots, flat.index_copy_(0, sent.positions, left).view_as(rows)
        )
        self._module.traffic.add(entries_sent=sent.positions.numel(), entries=gradient.numel())
        return sent.payload


def header_at(read: bytes, start: int) -> bytes | None:
    """The header of a payload in the first bytes of a message; None if they do not hold it."""
    header = read[start : start + HEADER.size]
    return header if len(header) == HEADER.size else None


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
        module.take_answers()  # also if this rank has not pooled them
        due = _exchange_gradients(module)
        new = [one for one in module.lookups if one.is_new]
        module.usually_reached = tuple(one in due for one in new)
        for one in new:
            one.is_new = False
        # What was sent in an earlier backward stays only if this one has come to it again.
        module.lookups = [one for one in module.lookups if one in due or not one.is_returned]
        if due:
            with module.traffic.timed():
                _refuse_dense_gradient(module)
                module.collected.deliver(module.weight, module.placement.world_size, module.resolve)


def _exchange_gradients(module: ShardedEmbeddingBags) -> list[ChangesLookup]:
    """Collect the gradients of this rank's rows, and the residuals of rows that others have
    evicted; the look-ups that some rank has reached.

    The first parts have room for the look-ups that are usually reached. A rank sends the gradients
    of those that it has reached itself, up to the first that it has not: whether others have
    reached that one it learns from their heads. What is missing then is the rest.
    """
    exchange = module.exchange_group
    peers = exchange.peers
    likely = _likely_reached(module)
    reached = _bits_of(module, [one for one in module.lookups if one.gradient is not None])
    early = _sent_first(module, likely, reached)
    rooms = _end_sizes(module, likely, of_owners=True)
    expected = _end_sizes(module, likely, of_owners=False)
    head = _end_head(module, reached)
    with module.traffic.timed():
        own = [one.gradient_payloads() for one in early]
    missing_bytes = _sizes_of(peers, [one for one in likely if one not in early], of_owners=True)
    bodies = {
        peer: [
            *(payloads[peer] for payloads in own),
            torch.zeros(missing_bytes[peer], dtype=torch.uint8, device=exchange.device),
            *(one.sent[peer] for one in module.evicted),
        ]
        for peer in peers
    }
    if exchange.check_order is not None:
        exchange.check_order("rows")
    most = _most(module, expected, {peer: module.rooms.received_ids[peer].size() for peer in peers})
    heads = dict.fromkeys(peers, head)
    transfer = FirstParts(exchange, GRADIENTS, heads, bodies, rooms, expected, most, module.traffic)
    found = transfer.wait()
    _check_kinds(module, found, END)
    bits = {peer: int.from_bytes(found[peer][1 : len(head)], "little") for peer in peers}
    bits[exchange.rank] = reached
    for others in bits.values():
        reached |= others
    is_reached = {one for one in module.lookups if _bits_of(module, [one]) & reached}
    due = [one for one in likely if one in is_reached]
    due += [one for one in module.lookups if one in is_reached and one not in likely]
    sent_first = {rank: _sent_first(module, likely, of_rank) for rank, of_rank in bits.items()}
    received = {peer: part[len(head) :] for peer, part in transfer.complete(expected).items()}
    gradient_bytes = _sizes_of(peers, likely, of_owners=False)
    _collect_evicted(module, {peer: received[peer][gradient_bytes[peer] :] for peer in peers})
    sources = {peer: (received[peer], sent_first[peer]) for peer in peers}
    payloads_of = _divided(sources)
    read = {
        peer: header_at(bytes_read, len(head))
        for peer, bytes_read in found.items()
        if sent_first[peer]
    }
    if any(len(sent) < len(due) for sent in sent_first.values()):
        with module.traffic.timed():
            late = [one.gradient_payloads() for one in due if one not in early]
        rest = {peer: torch.cat([each[peer] for each in late]) for peer in peers if late}
        missing = {peer: [one for one in due if one not in sent_first[peer]] for peer in peers}
        sizes = {
            peer: sum(one.gradient_sizes(of_owners=False)[peer] for one in ones)
            for peer, ones in missing.items()
        }
        rests = exchange.start(rest, sizes, module.traffic, GRADIENTS)()
        payloads_of |= _divided({peer: (rests[peer], missing[peer]) for peer in peers})
    with module.traffic.timed():
        for one in due:
            first_of = {peer: header for peer, header in read.items() if sent_first[peer][0] is one}
            one.collect({peer: payloads_of[peer, one] for peer in peers}, first_of)
    return due


def _divided(
    sources: Mapping[int, tuple[Tensor, list[ChangesLookup]]],
) -> dict[tuple[int, ChangesLookup], Tensor]:
    """The gradients of look-ups from each rank, which lie one after the other."""
    found = {}
    for peer, (data, lookups) in sources.items():
        for one in lookups:
            size = one.gradient_sizes(of_owners=False)[peer]
            found[peer, one], data = data.tensor_split([size])
    return found


def _likely_reached(module: ShardedEmbeddingBags) -> list[ChangesLookup]:
    """The new look-ups that a backward reaches as a rule: those that the last one has reached of as
    many, else all.
    """
    new = [one for one in module.lookups if one.is_new]
    if len(new) != len(module.usually_reached):
        return new
    return [one for one, is_usual in zip(new, module.usually_reached, strict=True) if is_usual]


def _bits_of(module: ShardedEmbeddingBags, lookups: Sequence[ChangesLookup]) -> int:
    """A bit for each of some look-ups, the last one's first."""
    return sum(1 << place for place, one in enumerate(reversed(module.lookups)) if one in lookups)


def _end_head(module: ShardedEmbeddingBags, reached: int) -> bytes:
    """The head of an end: as long on every rank, which have the same look-ups."""
    return bytes([END]) + reached.to_bytes(-(-len(module.lookups) // 8), "little")


def _sent_first(
    module: ShardedEmbeddingBags, likely: Sequence[ChangesLookup], reached: int
) -> list[ChangesLookup]:
    """The look-ups whose gradients a rank sends at once, which has reached those of these bits."""
    return list(takewhile(lambda one: _bits_of(module, [one]) & reached, likely))


def _end_sizes(
    module: ShardedEmbeddingBags, likely: Sequence[ChangesLookup], of_owners: bool
) -> dict[int, int]:
    """The first parts of the end of a backward, to owners or from users."""
    sizes = _sizes_of(module.exchange_group.peers, likely, of_owners)
    parts = [dict.fromkeys(sizes, len(_end_head(module, 0)))]
    for one in module.evicted:
        parts.append(
            {peer: data.numel() for peer, data in one.sent.items()}
            if of_owners
            else one.sizes(module.embedding_dim, module.value_format)
        )
    return {
        peer: max(size + sum(part[peer] for part in parts), HEAD_BYTES)
        for peer, size in sizes.items()
    }


def _sizes_of(
    peers: Sequence[int], lookups: Sequence[ChangesLookup], of_owners: bool
) -> dict[int, int]:
    """The bytes of the gradients of some look-ups, to owners or from users."""
    sizes = [one.gradient_sizes(of_owners) for one in lookups]
    return {peer: sum(size[peer] for size in sizes) for peer in peers}


def _collect_evicted(module: ShardedEmbeddingBags, received: dict[int, Tensor]) -> None:
    """Collect the residuals that other ranks have sent, which it takes out of ``received``."""
    dim = module.embedding_dim
    with module.traffic.timed():
        for one in module.evicted:
            for peer, size in one.sizes(dim, module.value_format).items():
                data, received[peer] = received[peer].tensor_split([size])
                places = one.expected[peer]
                if not places.size:
                    continue
                rows = messages.decode_whole(data, places.size, dim, module.value_format)
                if rows.any():  # not of look-ups without a backward
                    module.collected.add(
                        torch.from_numpy(places).to(rows.device), rows.to(module.remembered_dtype)
                    )
    module.evicted = []


def send_evicted(module: ShardedEmbeddingBags) -> None:
    """Send the residuals of evicted rows that wait for a backward; a collective call if there are
    some, as on every rank.
    """
    if not module.evicted:
        return
    module.take_answers()
    sizes = [one.sizes(module.embedding_dim, module.value_format) for one in module.evicted]
    peers = module.exchange_group.peers
    sent = {peer: torch.cat([one.sent[peer] for one in module.evicted]) for peer in peers}
    expected = {peer: sum(size[peer] for size in sizes) for peer in peers}
    received = module.exchange_group.start(sent, expected, module.traffic, "evicted")()
    _collect_evicted(module, {peer: received[peer] for peer in peers})


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


def _start_requests(
    module: ShardedEmbeddingBags, heads: Mapping[int, bytes], bodies: Mapping[int, list[Tensor]]
) -> FirstParts:
    """Send each owner a head and ids."""
    exchange = module.exchange_group
    if exchange.check_order is not None:
        exchange.check_order("rows")
    rooms = {peer: room.size() for peer, room in module.rooms.sent_ids.items()}
    expected = {peer: room.size() for peer, room in module.rooms.received_ids.items()}
    most = _most(module, expected, _end_sizes(module, _likely_reached(module), of_owners=False))
    on_device = {
        peer: [part.to(exchange.device) for part in bodies.get(peer, [])] for peer in heads
    }
    return FirstParts(
        exchange, "ids", heads, on_device, rooms, expected, most, module.traffic, to_host=True
    )


def _most(
    module: ShardedEmbeddingBags, expected: Mapping[int, int], elsewhere: Mapping[int, int]
) -> Mapping[int, int]:
    """The bytes to receive from each rank at most, which may be at the other collective, if a rank
    can receive fewer.
    """
    if not module.exchange_group.takes_shorter:
        return expected
    return {peer: max(size, elsewhere[peer]) for peer, size in expected.items()}


def _check_kinds(
    module: ShardedEmbeddingBags,
    heads: Mapping[int, bytes],
    kind: int,
    fault: Exception | None = None,
) -> None:
    """Raise the fault of a rank, and refuse ranks that are at different collectives (RuntimeError),
    both on every rank.
    """
    found = {peer: head[0] & ~HAS_REST for peer, head in heads.items()}
    if fault is not None or WRONG_BATCH in found.values():
        module.exchange_group.raise_fault(fault)
    for peer, other in found.items():
        if other != kind:
            raise RuntimeError(
                f"Rank {peer} of the process group and this one have called {module.name!r} a"
                " different number of times in this step. In each training step all ranks must look"
                " up the tables equally often. A rank without ids gives an empty batch."
            )
