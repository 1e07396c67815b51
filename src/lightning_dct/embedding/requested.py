"""The rows of one request, of all peers together: on the rank that makes it and on those that
answer.

Messages about them go both ways and have one form on both ends. On a CPU they are made and read one
peer after the other by compiled loops, elsewhere all at once by :mod:`.on_device`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_dct.compress.threshold import GUARD_RESELECT, nudge
from lightning_dct.embedding import messages, on_device
from lightning_dct.embedding.messages import Message, RowSums
from lightning_dct.embedding.on_device import Codes, Forms, Piece, Selected
from lightning_dct.embedding.owners import Int64Array
from lightning_dct.embedding.store import RowStore, add_entries
from lightning_dct.kernels import cpu_kernel, positions_of
from lightning_dct.kernels.bits import pack_codes, positions_in
from lightning_dct.kernels.plain import SMALLEST_THRESHOLD
from lightning_dct.wire.payload import unpack_payload
from lightning_dct.wire.positions import PositionCode, reading

if TYPE_CHECKING:
    from lightning_dct.embedding.sharded import ShardedEmbeddingBags


class Sent(NamedTuple):
    """Messages about changes, and what is in them."""

    payloads: Mapping[int, Sequence[Piece]]  # by peer, the parts of its message
    sums: Tensor  # shape `[k, dim]`: what was selected from
    positions: Tensor  # shape `[count]`, int64: in the flattened rows of all peers
    received: Tensor  # shape `[count]`, fp32: the values as receivers read them
    left: Tensor  # shape `[count]`: what remains to be sent at these positions
    is_finite: bool  # whether no sum is infinite or NaN


class Answers(NamedTuple):
    """Messages to all users of some rows."""

    whole: Mapping[int, Sequence[Piece]]  # by user, the bytes of whole rows
    counts: Mapping[int, int]  # by user, the number of them
    changes: Mapping[int, Sequence[Piece]]  # by user, the payload of changes


class RequestedRows:
    """The rows of a request.

    Args:
        module: The tables.
        store: The copies: of the rank that has asked, or of the owner.
        wanted: By peer, the places on the owner.
        slots: By peer, the slots of the copies.
        is_sent: Whether this rank has made the request.
    """

    def __init__(
        self,
        module: ShardedEmbeddingBags,
        store: RowStore,
        wanted: Mapping[int, Int64Array],
        slots: Mapping[int, Int64Array],
        is_sent: bool,
    ) -> None:
        self._module = module
        self._store = store
        self.peers = list(wanted)
        self.wanted = wanted
        # Until another request is admitted, or a state is loaded, slots keep their rows.
        self._requests = store.cache.requests
        self._row_at = store.cache.row_at
        none = np.empty(0, dtype=np.int64)
        self.places = np.concatenate([none, *wanted.values()])
        self._cached = np.concatenate([none, *slots.values()])
        self.sizes = [places.size for places in wanted.values()]
        self._starts = list(accumulate(self.sizes, initial=0))
        rank = module.exchange_group.rank
        self.messages = {
            peer: messages.message_about(
                module.placement.tables_of(peer if is_sent else rank, places),
                module.embedding_dim,
                module.density,
                module.value_format,
            )
            for peer, places in wanted.items()
        }
        self._sources = [f"Embedding rows from rank {peer} of the process group" for peer in wanted]
        # By how many entries those of a row are farther on in the copies than in the request.
        farther = (self._cached - np.arange(self._cached.size)) * module.embedding_dim
        if self._is_on_host or not self.peers:
            self.slots, self._farther, self.places_there = (
                torch.from_numpy(array) for array in (self._cached, farther, self.places)
            )
            return
        forms = list(self.messages.values())
        self._forms = Forms(forms, module.weight.device, self._cached, farther, self.places)
        self.slots, self._farther, self.places_there = self._forms.more

    @property
    def _is_on_host(self) -> bool:
        return self._module.weight.device.type == "cpu"

    @property
    def num_bytes(self) -> dict[int, int]:
        """By peer, the bytes of a message about changes."""
        return {peer: message.layout.num_bytes for peer, message in self.messages.items()}

    def check_not_evicted(self) -> None:
        """Refuse to use copies whose slots other rows have by now (RuntimeError)."""
        cache = self._store.cache
        if cache.requests == self._requests and cache.row_at is self._row_at:
            return
        is_other = cache.row_at[self._cached] != self.places
        is_other |= cache.peer_at[self._cached] != np.repeat(self.peers, self.sizes)
        if is_other.any():
            raise RuntimeError(
                "Rows were evicted between a request and its backward. If there are several"
                f" requests before a backward, `cache_rows` ({cache.capacity}) must hold the rows"
                " of all requests. Raise it."
            )

    def copies(self) -> Tensor:
        """The copies of the rows, ``[k, dim]``."""
        return self._store.copies.index_select(0, self.slots)

    def answer(self) -> Answers:
        """Answer the users: rows whose copies are outdated whole, and changes of the others."""
        if not self.peers:
            return Answers({}, {}, {})
        # Whole rows are rounded, and the rest of them may be among the changes.
        outdated = np.flatnonzero(self._store.take_outdated(self._cached))
        if self._is_on_host:
            return self._answer_on_host(outdated)
        now = self._module.own_rows(self.places, self.places_there)
        return self._answer_on_device(now.to(self._module.remembered_dtype), outdated)

    def _answer_on_host(self, outdated: Int64Array) -> Answers:
        now, now_at = self._module.rows_in_place(
            self.places, self.places_there, self._module.remembered_dtype
        )
        copies = self._store.copies
        at = torch.from_numpy(outdated)
        wanted = now.index_select(0, now_at.index_select(0, at))
        known = copies.index_select(0, self.slots.index_select(0, at))
        differ = (wanted != known).any(dim=1)
        chosen = at[differ]
        wanted = wanted[differ] - messages.finite(known[differ])
        cuts = np.searchsorted(chosen.numpy(), self._starts).tolist()
        whole: dict[int, list[Piece]] = {}
        counts = {}
        changes: dict[int, list[Piece]] = {}
        for number, (peer, message) in enumerate(self.messages.items()):
            own = slice(cuts[number], cuts[number + 1])
            rows = self._rows_of(number)
            data, received = messages.encode_some(wanted[own], chosen[own] - rows.start, message)
            if len(received):
                self._add_whole(chosen[own], received)
            whole[peer] = [data]
            counts[peer] = len(received)
            sums = RowSums(now, now_at[rows], copies, self.slots[rows], scale=-1.0)
            sent = messages.compress_changes(sums, message, self._store.thresholds[peer])
            cpu_kernel().add_flagged(copies, self.slots[rows], sent.flags, sent.received)
            changes[peer] = [sent.payload]
            self._count(sent.received.numel(), message)
        self._module.traffic.add(entries_sent=len(chosen) * self._module.embedding_dim)
        return Answers(whole, counts, changes)

    def _rows_of(self, number: int) -> slice:
        """Which of the rows are those of a peer, by its number."""
        return slice(self._starts[number], self._starts[number + 1])

    def _count(self, num_sent: int, message: Message) -> None:
        """Count the entries of a message, of which so many were sent."""
        entries = message.num_rows * message.dim
        self._module.traffic.add(entries_sent=num_sent, entries=entries)

    def _answer_on_device(self, now: Tensor, outdated: Int64Array) -> Answers:
        known = self.copies()
        if not outdated.size:
            sent, _ = self._compress_on_device(now, known, -1.0)
            self._add_changes(sent, 0)
            none = [bytes(PositionCode(size, 0).num_bytes) for size in self.sizes]
            parts = {peer: [part] for peer, part in zip(self.peers, none, strict=True)}
            return Answers(parts, dict.fromkeys(self.peers, 0), sent.payloads)
        message = np.searchsorted(self._starts, outdated, side="right") - 1
        asked = np.bincount(message, minlength=len(self.peers))
        ends = asked.cumsum()
        within = np.arange(outdated.size) - (ends - asked)[message]
        places = outdated - np.array(self._starts)[message]
        at, of, within_there, places_there, ends_there = on_device.numbers_on(
            now.device, outdated, message, within, places, ends
        )
        before = known.index_select(0, at)
        wanted = now.index_select(0, at)
        chosen = (wanted != before).any(dim=1)
        base = messages.finite(before)
        value_format = self._module.value_format
        coded = on_device.encode_whole(
            wanted - base, of, within_there, asked.tolist(), value_format, chosen
        )
        after = torch.where(chosen.unsqueeze(1), base + coded.received.to(base), before)
        known.index_copy_(0, at, after)
        so_far = torch.nn.functional.pad(chosen.cumsum(0), (1, 0))
        sent, [numbers] = self._compress_on_device(
            now, known, -1.0, so_far.index_select(0, ends_there)
        )
        self._store.copies.index_copy_(0, self.slots.index_select(0, at), after)
        counts = np.diff(numbers, prepend=0).tolist()
        some = positions_in(chosen, sum(counts))
        of_some = of.index_select(0, some)
        coded_places = self._coded_places(of_some, places_there.index_select(0, some), counts)
        rows = coded.some(some).pieces(counts)
        whole = {
            peer: [first, *rest]
            for peer, first, rest in zip(self.peers, coded_places, rows, strict=True)
        }
        self._add_changes(sent, sum(counts))
        return Answers(whole, dict(zip(self.peers, counts, strict=True)), sent.payloads)

    def _coded_places(self, of: Tensor, places: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """By message, which of its rows are sent whole."""
        written, edges = self._codes_of_places(counts)
        num_bits = 8 * edges[-1]
        columns = written.table(counts, [0] * len(counts), spare=num_bits)
        table, planes = on_device.numbers_on(of.device, columns, written.planes)
        each = table.view(columns.shape).index_select(0, of).unbind(1)
        numbers = torch.arange(1, of.numel() + 1, device=of.device)
        bits = on_device.zero_bits(num_bits + of.numel(), of.device)
        written.write(bits, each, numbers, places, planes)
        packed = pack_codes(bits, 1)
        return [packed[low:high] for low, high in pairwise(edges)]

    def _codes_of_places(self, counts: Sequence[int]) -> tuple[Codes, list[int]]:
        """The codes of which rows are sent whole, by message, side by side after one byte; and the
        bytes at which they begin and end.
        """
        codes = [PositionCode(size, count) for size, count in zip(self.sizes, counts, strict=True)]
        edges = list(accumulate((code.num_bytes for code in codes), initial=1))
        return Codes(codes, [8 * start for start in edges[:-1]]), edges

    def _add_whole(self, at: Tensor, values: Tensor) -> None:
        """Add whole rows, ``[n, dim]``, to the copies of the requested rows at some numbers."""
        copies = self._store.copies
        slots = self.slots.index_select(0, at)
        copies.index_copy_(
            0, slots, messages.finite(copies.index_select(0, slots)) + values.to(copies)
        )

    def _add_changes(self, sent: Sent, num_whole: int) -> None:
        """Add what was sent to the copies, and count it."""
        add_entries(self._store.copies, self._farther, sent.positions, sent.received)
        num_sent = num_whole * self._module.embedding_dim + sent.positions.numel()
        self._module.traffic.add(entries_sent=num_sent, entries=sent.sums.numel())

    def take_answers(
        self,
        answers: Mapping[int, Tensor],
        counts: Mapping[int, int],
        headers: Mapping[int, bytes | None],
    ) -> None:
        """Add answers to the copies.

        Args:
            answers: By owner, the payload of changes, and whole rows.
            counts: By owner, the number of whole rows.
            headers: By owner, the header of the payload, as far as the host has it.
        """
        self.check_not_evicted()
        if not self.peers:
            return
        payloads = {}
        whole = {}
        for peer, size in self.num_bytes.items():
            payloads[peer], whole[peer] = answers[peer].tensor_split([size])
        if self._is_on_host:
            for number, (peer, message) in enumerate(self.messages.items()):
                with reading(self._sources[number]):
                    places, rows = messages.decode_some(message, whole[peer], counts[peer])
                    sent = unpack_payload(message.layout, payloads[peer])
                if len(rows):
                    self._add_whole(places + self._starts[number], rows)
                slots = self.slots[self._rows_of(number)]
                cpu_kernel().add_flagged(self._store.copies, slots, sent.flags, sent.values)
            return
        if any(counts.values()):
            self._take_whole([whole[peer] for peer in self.peers], [*counts.values()])
        positions, values = self.read(payloads, headers)
        add_entries(self._store.copies, self._farther, positions, values)

    def _take_whole(self, parts: Sequence[Tensor], counts: Sequence[int]) -> None:
        codes, edges = self._codes_of_places(counts)
        coded = []
        rows_of = []
        for part, (start, end) in zip(parts, pairwise(edges), strict=True):
            coded.append(part[: end - start])
            rows_of.append(part[end - start :])
        first_byte = torch.zeros(1, dtype=torch.uint8, device=self.slots.device)
        together = torch.cat([first_byte, *coded])
        first_rows = self._starts[:-1]
        read = codes.read(self._module.reads, together, counts, first_rows, self._sources)
        rows = on_device.decode_whole(
            rows_of, counts, self._module.embedding_dim, self._module.value_format
        )
        self._add_whole(read.positions, rows)

    def compress_gradient(
        self, gradient: Tensor, first: int, end: int
    ) -> Mapping[int, Sequence[Piece]]:
        """By owner, the gradient of its rows. What is not sent joins the residuals.

        The rows of ``gradient`` from number ``first`` to ``end`` are of this rank itself.
        """
        self.check_not_evicted()
        if not self.peers:
            return {}
        residual = self._store.residual
        if self._is_on_host:
            at = torch.cat([torch.arange(first), torch.arange(end, len(gradient))])
            payloads = {}
            for number, (peer, message) in enumerate(self.messages.items()):
                rows = self._rows_of(number)
                slots = self.slots[rows]
                sums = RowSums(residual, slots, gradient, at[rows], is_kept=True)
                one = messages.compress_changes(sums, message, self._store.thresholds[peer])
                cpu_kernel().keep_rest(residual, slots, one.flags, one.values, one.received)
                payloads[peer] = [one.payload]
                self._count(one.received.numel(), message)
            return payloads
        others = [part for part in (gradient[:first], gradient[end:]) if len(part)]
        gradient = others[0] if len(others) == 1 else torch.cat(others or [gradient[:0]])
        sent = self._compress_on_device(residual.index_select(0, self.slots), gradient, 1.0)[0]
        flat = sent.sums.view(-1)
        left = sent.left
        if not sent.is_finite:
            left = torch.where(left.isfinite(), left, flat.index_select(0, sent.positions))
        flat.index_copy_(0, sent.positions, left)
        residual.index_copy_(0, self.slots, sent.sums)
        self._module.traffic.add(entries_sent=sent.positions.numel(), entries=gradient.numel())
        return sent.payloads

    def _compress_on_device(
        self, rows: Tensor, addend: Tensor, scale: float, *more: Tensor
    ) -> tuple[Sent, list[list[int]]]:
        """Add ``scale * addend`` to rows of all peers, both ``[k, dim]``, and send entries of the
        sums. ``rows`` may change. And other numbers that the host reads with those that it needs.
        """
        forms = self._forms
        segments = [
            (self._store.thresholds[peer], table)
            for peer, message in self.messages.items()
            for table in message.tables
        ]
        is_full = [size == target for size, target in zip(forms.sizes, forms.targets, strict=True)]
        limits = np.zeros(len(segments))
        for number, (thresholds, table) in enumerate(segments):
            if is_full[number]:
                thresholds[table] = 0  # everything is sent
                limits[number] = SMALLEST_THRESHOLD
            elif thresholds[table]:
                limits[number] = max(thresholds[table], SMALLEST_THRESHOLD)
        selected = forms.select(self._module.reads, rows, addend, limits, scale, *more)
        for number, (thresholds, table) in enumerate(segments):
            if not is_full[number]:
                thresholds[table] = selected.limits[number]
        if not selected.is_finite:
            return self._send_some(selected), selected.more
        self._guard(selected, segments, is_full)
        packed = forms.pack(selected)
        payloads = dict(zip(self.peers, packed.payloads, strict=True))
        sent = Sent(payloads, selected.sums, packed.positions, packed.received, packed.left, True)
        return sent, selected.more

    def _guard(
        self,
        selected: Selected,
        segments: Sequence[tuple[messages.Float64Array, int]],
        is_full: Sequence[bool],
    ) -> None:
        """As :func:`lightning_dct.embedding.messages.guard`; thresholds that are selected anew are
        known with the next numbers that the host reads.
        """
        again = []
        for number, (thresholds, table) in enumerate(segments):
            if is_full[number]:
                continue
            count = selected.counts[number]
            target = self._forms.targets[number]
            size = self._forms.sizes[number]
            if count > GUARD_RESELECT * target:
                again.append(number)
            else:
                thresholds[table] = nudge(
                    float(thresholds[table]), count, target, size, messages.GUARD_AIM
                )
        if not again:
            return
        found = self._forms.kth_magnitudes(selected.sums.view(-1), again)

        def learn(values: list[float]) -> None:
            for number, value in zip(again, values, strict=True):
                thresholds, table = segments[number]
                thresholds[table] = value

        self._module.reads.later(learn, found)

    def _send_some(self, selected: Selected) -> Sent:
        """Send what a CPU sends of rows that are infinite or NaN, one message after the other."""
        dim = self._module.embedding_dim
        payloads: dict[int, list[Piece]] = {}
        parts = []
        segment = 0
        entry = 0
        for number, (peer, message) in enumerate(self.messages.items()):
            own = slice(self._starts[number], self._starts[number + 1])
            segments = slice(segment, segment + len(message.tables))
            segment = segments.stop
            reached = selected.counts[segments]
            entries = slice(entry, entry + sum(reached))
            entry = entries.stop
            parts_of = selected.sums[own].view(-1).split(message.layout.tensor_sizes)
            positions = selected.positions[entries] - own.start * dim
            sent = messages.send_some(
                parts_of.__getitem__,
                message,
                self._store.thresholds[peer],
                selected.limits[segments],
                positions,
                selected.values[entries],
                reached,
            )
            payloads[peer] = [sent.payload]
            left = sent.values - sent.received.to(sent.values.dtype)
            positions = positions_of(sent.flags, sent.values.numel())
            parts.append((positions + own.start * dim, sent.received, left))
        positions, received, left = _joined(parts)
        return Sent(payloads, selected.sums, positions, received, left, is_finite=False)

    def read(
        self, payloads: Mapping[int, Tensor], headers: Mapping[int, bytes | None]
    ) -> tuple[Tensor, Tensor]:
        """Read messages about changes on a device, by peer: positions in the flattened rows of all
        peers, int64, and values, fp32 (PayloadError).

        ``headers`` are their first bytes, as far as the host has them.
        """
        return self._forms.unpack(
            self._module.reads,
            [payloads[peer] for peer in self.peers],
            [headers.get(peer) for peer in self.peers],
            self._sources,
        )

    def collect(self, payloads: Mapping[int, Tensor], headers: Mapping[int, bytes | None]) -> None:
        """Collect gradients of these rows that users have sent, by user (PayloadError)."""
        if not self.peers:
            return
        collected = self._module.collected
        dtype = self._module.remembered_dtype
        dim = self._module.embedding_dim
        if not self._is_on_host:
            positions, values = self.read(payloads, headers)
            collected.add_entries(self.places_there, positions, values.to(dtype), dim)
            return
        for number, (peer, message) in enumerate(self.messages.items()):
            with reading(self._sources[number]):
                sent = unpack_payload(message.layout, payloads[peer])
            numbers, rows = cpu_kernel().rows_of_flags(sent.flags, sent.values, dim)
            collected.add(self.places_there[self._rows_of(number)][numbers], rows.to(dtype))


def _joined(parts: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    """The tensors of several messages, the same ones of all messages one after the other."""
    if len(parts) == 1:
        return list(parts[0])
    return [torch.cat(same) for same in zip(*parts, strict=True)]
