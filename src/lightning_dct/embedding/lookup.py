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

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_dct.compress.awaited import to_device
from lightning_dct.embedding import first_parts, messages, on_device
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
from lightning_dct.embedding.on_device import Piece
from lightning_dct.embedding.owners import Int64Array
from lightning_dct.embedding.requested import RequestedRows
from lightning_dct.embedding.store import Evicted
from lightning_dct.kernels import add_rows
from lightning_dct.traffic import FP32_BYTES, ID_BYTES
from lightning_dct.wire.payload import HEADER
from lightning_dct.wire.positions import reading

if TYPE_CHECKING:
    from lightning_dct.embedding.sharded import ShardedEmbeddingBags


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


# By owner, the residuals of evicted rows, as the bytes of parts.
Residuals = dict[int, list[Tensor]]


class EvictedRows(NamedTuple):
    """Of one look-up, the rows that have left caches, whose residuals wait for a backward."""

    sent: Residuals  # of this rank
    expected: dict[int, Int64Array]  # by user, the places of the rows that it has evicted

    def on(self, device: torch.device) -> EvictedRows:
        """The same, with the bytes on a device."""
        moved = {peer: [part.to(device) for part in data] for peer, data in self.sent.items()}
        return self._replace(sent=moved)

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
            self._rows = DistinctRows(
                bags, module.placement, module.exchange_group.rank, module.weight.device
            )
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
            module.note_requests([self._rows.wanted[self._rank], *self._received.wanted.values()])
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
        bodies = {}
        sizes = {}
        with module.traffic.timed():
            answers = self._received.answer()
            for peer, num_changes in self._received.num_bytes.items():
                heads[peer] = write_head(ANSWER, [answers.counts[peer]])
                bodies[peer] = [*answers.changes[peer], *answers.whole[peer]]
                sizes[peer] = num_changes + rooms.sent_rows[peer].size(num_changes)
            expected = {
                peer: known + rooms.received_rows[peer].size(known)
                for peer, known in self._sent.num_bytes.items()
            }
        transfer = FirstParts(
            module.exchange_group,
            "rows",
            heads,
            bodies,
            sizes,
            expected,
            expected,
            module.traffic,
            module.reads,
        )
        for peer, num_changes in self._received.num_bytes.items():
            rooms.sent_rows[peer].note(transfer.lengths[peer] - num_changes)
        return transfer

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
        known = self._sent.num_bytes
        for peer, ([count], size) in heads.items():
            with reading(f"Rank {peer} of the process group"):
                lengths[peer] = size + self._sent.messages[peer].some_num_bytes(count)
            module.rooms.received_rows[peer].note(lengths[peer])
            lengths[peer] += known[peer]
        answers = transfer.complete(lengths)
        with module.traffic.timed():
            self._sent.take_answers(
                {peer: answers[peer][size:] for peer, (_, size) in heads.items()},
                {peer: count for peer, ([count], _) in heads.items()},
                {peer: header_at(found[peer], size) for peer, (_, size) in heads.items()},
            )

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
            self._sent.check_not_evicted()
            own = module.own_rows(rows.wanted[self._rank], rows.own_there)
            copies = module.own_copies.copies
            before = sum(rows.sizes[: self._rank])
            first, last = copies.index_select(0, self._sent.slots).tensor_split([before])
            found = torch.cat([first, own.to(copies.dtype), last])
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
        return (self._sent if of_owners else self._received).num_bytes

    def gradient_payloads(self) -> Mapping[int, Sequence[Piece]]:
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
        before = sum(rows.sizes[: self._rank])
        end = before + rows.sizes[self._rank]
        self._own_gradient = gradient[before:end]
        return self._sent.compress_gradient(gradient, before, end)

    def collect(self, payloads: Mapping[int, Tensor], headers: Mapping[int, bytes | None]) -> None:
        """Collect the gradient of this rank's rows: its own, and what each user has sent.

        ``headers`` are those of payloads that the host has read already.
        """
        module = self._module
        gradient = self._own_gradient
        del self._own_gradient
        module.collected.add(self._rows.own_there, gradient)
        self._received.collect(payloads, headers)

    def _make_requests(self) -> tuple[dict[int, bytes], dict[int, list[Piece]], Residuals]:
        """By owner: a head, the bytes of ids and those of evicted rows, and their residuals."""
        module = self._module
        wanted = {peer: self._rows.wanted[peer] for peer in self._peers}
        ids = {
            peer: module.own_copies.codes[peer].encode(places) for peer, places in wanted.items()
        }
        slots, gone = module.own_copies.admit(wanted)
        heads = {}
        payloads: dict[int, list[Piece]] = {}
        for peer, (places, _) in gone.items():
            # Most requests evict nothing, and then say so in no byte.
            evicted = module.own_copies.codes[peer].encode(places) if places.size else ids[peer][:0]
            payloads[peer] = [ids[peer], evicted]
            lookups = int(self._rows.lookups[peer])
            heads[peer] = write_head(REQUEST, [ids[peer].numel(), lookups, evicted.numel()])
        residuals = _residuals_of(gone, module.value_format)
        module.own_copies.learn()
        self._sent = RequestedRows(module, module.own_copies, wanted, slots, is_sent=True)
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
        self._received = RequestedRows(module, module.peer_copies, wanted, slots, is_sent=False)


def _residuals_of(gone: Mapping[int, Evicted], value_format: str) -> Residuals:
    """By owner, the residuals of evicted rows as bytes."""
    if not any(places.size for places, _ in gone.values()):
        return {peer: [] for peer in gone}
    parts = [residual for _, residual in gone.values()]
    if parts[0].is_cpu:
        coded = [[messages.encode_whole(part, value_format)] for part in parts]
        return dict(zip(gone, coded, strict=True))
    counts = [len(part) for part in parts]
    numbers = [np.repeat(np.arange(len(counts)), counts), np.concatenate([*map(np.arange, counts)])]
    of, index = on_device.numbers_on(parts[0].device, *numbers)
    rows = torch.cat(parts)
    together = on_device.encode_whole(rows, of, index, counts, value_format)
    return dict(zip(gone, together.pieces(counts), strict=True))


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
                module.collected.deliver(
                    module.weight,
                    module.placement.world_size,
                    module.resolve,
                    module.reads,
                    module.num_places,
                )


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
            *(part for payloads in own for part in payloads[peer]),
            bytes(missing_bytes[peer]),
            *(part for one in module.evicted for part in one.sent[peer]),
        ]
        for peer in peers
    }
    if exchange.check_order is not None:
        exchange.check_order("rows")
    most = _most(module, expected, {peer: module.rooms.received_ids[peer].size() for peer in peers})
    heads = dict.fromkeys(peers, head)
    transfer = FirstParts(
        exchange, GRADIENTS, heads, bodies, rooms, expected, most, module.traffic, module.reads
    )
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
        bodies = {peer: [part for each in late for part in each[peer]] for peer in peers if late}
        rest = first_parts.parts_on_device(bodies, exchange.device)
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
            {peer: sum(part.numel() for part in data) for peer, data in one.sent.items()}
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
    with module.traffic.timed():
        for one in module.evicted:
            parts = {}
            for peer, size in one.sizes(module.embedding_dim, module.value_format).items():
                parts[peer], received[peer] = received[peer].tensor_split([size])
            for places, rows in _read_residuals(module, one.expected, parts):
                if rows.any():  # not of look-ups without a backward
                    there = to_device(torch.from_numpy(places), rows.device)
                    module.collected.add(there, rows.to(module.remembered_dtype))
    module.evicted = []


def _read_residuals(
    module: ShardedEmbeddingBags, expected: Mapping[int, Int64Array], parts: Mapping[int, Tensor]
) -> Iterator[tuple[Int64Array, Tensor]]:
    """Places of rows and their residuals: on a CPU by user, else of all users."""
    dim = module.embedding_dim
    value_format = module.value_format
    some = {peer: places for peer, places in expected.items() if places.size}
    if module.weight.is_cpu:
        for peer, places in some.items():
            yield places, messages.decode_whole(parts[peer], places.size, dim, value_format)
    elif some:
        counts = [places.size for places in some.values()]
        data = [parts[peer] for peer in some]
        rows = on_device.decode_whole(data, counts, dim, value_format)
        yield np.concatenate([*some.values()]), rows


def send_evicted(module: ShardedEmbeddingBags) -> None:
    """Send the residuals of evicted rows that wait for a backward; a collective call if there are
    some, as on every rank.
    """
    if not module.evicted:
        return
    module.take_answers()
    sizes = [one.sizes(module.embedding_dim, module.value_format) for one in module.evicted]
    peers = module.exchange_group.peers
    sent = {peer: [part for one in module.evicted for part in one.sent[peer]] for peer in peers}
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
    module: ShardedEmbeddingBags, heads: Mapping[int, bytes], bodies: Mapping[int, list[Piece]]
) -> FirstParts:
    """Send each owner a head and ids."""
    exchange = module.exchange_group
    if exchange.check_order is not None:
        exchange.check_order("rows")
    rooms = {peer: room.size() for peer, room in module.rooms.sent_ids.items()}
    expected = {peer: room.size() for peer, room in module.rooms.received_ids.items()}
    most = _most(module, expected, _end_sizes(module, _likely_reached(module), of_owners=False))
    return FirstParts(
        exchange,
        "ids",
        heads,
        {peer: bodies.get(peer, []) for peer in heads},
        rooms,
        expected,
        most,
        module.traffic,
        module.reads,
        to_host=True,
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
