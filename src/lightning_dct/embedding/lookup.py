"""One training look-up through changes: each distinct row is asked for once, and only what moved travels, both ways.

    rank that uses a row (R: its copy, G: its residual)            rank that owns it (E: the row, R: that very copy)

      distinct ids, sorted  ----------------------------------->   D = E - R
      R += sent             <--------  D where |D| >= tau  -----   R += sent
      pool R; the rest of the model runs
      G += dL/dR            ---------  G where |G| >= tau  ---->   the sum over all ranks is E's gradient
      G -= sent

Nothing is zeroed and nothing is lost, which sets this apart from the paper's exchange of values (:mod:`.values`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lightning_dct.embedding.bags import Bags
from lightning_dct.embedding.changes import Message, compress_changes, message_about, read_changes
from lightning_dct.embedding.deliver import deliver, when_backward_ends
from lightning_dct.embedding.exchange import check_announced
from lightning_dct.embedding.placement import Int64Array
from lightning_dct.embedding.rows import RememberedRows, add_entries
from lightning_dct.kernels import add_rows
from lightning_dct.traffic import FP32_BYTES, ID_BYTES
from lightning_dct.wire import PayloadError

if TYPE_CHECKING:
    from lightning_dct.embedding.sharded import ShardedEmbeddingBags


class DistinctRows:
    """The distinct rows of some bags, by owner.

    Attributes:
        bags: What is looked up.
        wanted: For each rank, the places asked of it: ascending, distinct.
        lookups: For each rank, how many look-ups they stand for.
        starts: Where each rank's begin among all distinct rows; one more for the end.
        inverse: Shape ``[lookups]``, int64: which distinct row each look-up is.
    """

    def __init__(self, bags: Bags, module: ShardedEmbeddingBags) -> None:
        placement = module.placement
        owners, places = placement.locate(bags.tables, bags.rows)
        stride = max(max(placement.owned_rows), 1)
        keys, inverse = np.unique(owners * stride + places, return_inverse=True)
        ranks = np.arange(placement.world_size + 1)
        self.bags = bags
        self.starts = np.searchsorted(keys, ranks * stride)
        self.wanted = [keys[self.starts[rank] : self.starts[rank + 1]] - rank * stride for rank in ranks[:-1].tolist()]
        self.lookups = np.bincount(owners, minlength=placement.world_size)
        self.inverse = torch.from_numpy(inverse.reshape(-1)).to(module.weight.device)

    def part(self, rows: Tensor, rank: int) -> Tensor:
        """The rows of one owner among all distinct rows."""
        return rows[self.starts[rank] : self.starts[rank + 1]]


class Asked:
    """What another rank asks of this one.

    Attributes:
        places: Shape ``[k]``: the rows.
        slots: Where the copy that rank holds is mirrored.
        lookups: How many look-ups they stand for.
    """

    def __init__(self, places: Int64Array, slots: Tensor, lookups: int) -> None:
        self.places = places
        self.slots = slots
        self.lookups = lookups


class ChangesLookup:
    """A look-up under way; see the drawing at the top.

    The constructor asks for rows and starts what this rank owes the others; :meth:`pooled` waits for the answers.
    """

    def __init__(self, module: ShardedEmbeddingBags, bags: Bags) -> None:
        self._module = module
        self._rank, self._peers = module.exchange_group.rank, module.peers
        with module.traffic.timed():
            self._rows = DistinctRows(bags, module)
            payloads, told = self._ask()
        heard = module.exchange_group.announce(told, module.traffic)
        check_announced(heard, 0)
        with module.traffic.timed():
            row_bytes = module.embedding_dim * module.remembered_dtype.itemsize
            sizes = [
                int(heard[peer, 0] + heard[peer, 2] * row_bytes) if peer in self._peers else 0
                for peer in range(module.placement.world_size)
            ]
        requests = module.exchange_group.start(payloads, sizes, module.traffic).wait()
        with module.traffic.timed():
            self._asked = {
                peer: self._read_request(peer, requests[peer], int(heard[peer, 0]), int(heard[peer, 1]))
                for peer in self._peers
            }
            self._count()
            # What this rank hears from an owner, and what it tells a user, about the same rows in both directions.
            self._mine = {peer: self._message(peer, rows) for peer, rows in enumerate(self._rows.wanted)}
            self._theirs = {peer: self._message(self._rank, asked.places) for peer, asked in self._asked.items()}
            answers = [self._answer(peer) for peer in range(module.placement.world_size)]
            sizes = [self._mine[peer].layout.num_bytes if peer in self._peers else 0 for peer in self._mine]
        self._incoming = module.exchange_group.start(answers, sizes, module.traffic)

    def pooled(self) -> Tensor:
        """Wait for the rows and pool them: shape ``[samples, tables, dim]``."""
        module, rows = self._module, self._rows
        answers = self._incoming.wait()
        with module.traffic.timed():
            parts: list[Tensor] = []
            for rank, places in enumerate(rows.wanted):
                if rank == self._rank:
                    parts.append(module.own_rows(places))
                    continue
                held, slots = self._held(rank)
                positions, values = self._read(rank, answers[rank], self._mine[rank])
                add_entries(held.copies, slots, positions, values)
                parts.append(held.copies.index_select(0, slots))
            pooled = rows.bags.pool(torch.cat(parts).to(module.weight.dtype).index_select(0, rows.inverse))
        return deliver(module.weight, pooled, self.send_gradient)

    def send_gradient(self, pooled_gradient: Tensor) -> None:
        """Start sending each owner the gradient of its rows; it arrives when backward ends."""
        module, rows = self._module, self._rows
        with module.traffic.timed():
            each = rows.bags.spread(pooled_gradient).to(module.remembered_dtype)
            gradient = each.new_zeros(int(rows.starts[-1]), module.embedding_dim)
            add_rows(gradient, rows.inverse, each)
            empty = torch.empty(0, dtype=torch.uint8, device=gradient.device)
            payloads = [
                self._gradient_payload(rank, rows.part(gradient, rank)) if rank in self._peers else empty
                for rank in range(module.placement.world_size)
            ]
            sizes = [0] * module.placement.world_size
            for peer in self._peers:
                sizes[peer] = self._theirs[peer].layout.num_bytes
        incoming = module.exchange_group.start(payloads, sizes, module.traffic)

        def finish() -> None:
            received = incoming.wait()
            with module.traffic.timed():
                own = torch.from_numpy(rows.wanted[self._rank]).to(gradient.device)
                module.collected.add(own, rows.part(gradient, self._rank))
                for peer in self._peers:
                    positions, values = self._read(peer, received[peer], self._theirs[peer])
                    dim = module.embedding_dim
                    touched, within = torch.unique_consecutive(positions // dim, return_inverse=True)
                    dense = gradient.new_zeros(touched.numel(), dim)
                    dense.view(-1).index_copy_(0, within * dim + positions % dim, values.to(dense.dtype))
                    places = torch.from_numpy(self._asked[peer].places).to(gradient.device)
                    module.collected.add(places[touched], dense)
                module.collected.deliver(module.weight, module.placement.world_size)

        when_backward_ends(finish)

    def _ask(self) -> tuple[list[Tensor], Int64Array]:
        module, world_size = self._module, self._module.placement.world_size
        device = module.weight.device
        told = np.zeros((world_size, 3), dtype=np.int64)
        payloads = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(world_size)]
        self._slots: dict[int, Tensor] = {}
        for peer in self._peers:
            wanted = self._rows.wanted[peer]
            ids = module.held[peer].code.encode(wanted).to(device)
            admission, flushed = module.held[peer].admit(wanted)
            self._slots[peer] = torch.from_numpy(admission.slots).to(device)
            told[peer] = ids.numel(), self._rows.lookups[peer], len(flushed)
            payloads[peer] = torch.cat([ids, flushed.reshape(-1).view(torch.uint8)])
        return payloads, told

    def _read_request(self, peer: int, request: Tensor, id_bytes: int, lookups: int) -> Asked:
        module = self._module
        try:
            places = module.mirrors[peer].code.decode(request[:id_bytes], lookups)
        except PayloadError as error:
            raise PayloadError(f"Rank {peer} of the process group: {error}.") from error
        # This end works out for itself which rows the other has had to let go.
        admission, _ = module.mirrors[peer].admit(places)
        flushed = request[id_bytes:].clone().view(module.remembered_dtype).view(-1, module.embedding_dim)
        if len(flushed) != admission.evicted.size:
            raise PayloadError(
                f"Rank {peer} has let {len(flushed)} rows go where {admission.evicted.size} were expected: the two"
                " ends' caches differ. Use the same `cache_rows` and the same checkpoint on every rank."
            )
        if len(flushed):
            module.collected.add(torch.from_numpy(admission.evicted).to(flushed.device), flushed)
        return Asked(places, torch.from_numpy(admission.slots).to(module.weight.device), lookups)

    def _answer(self, peer: int) -> Tensor:
        module = self._module
        if peer not in self._peers:
            return torch.empty(0, dtype=torch.uint8, device=module.weight.device)
        asked, mirror = self._asked[peer], module.mirrors[peer]
        now = module.own_rows(asked.places).to(module.remembered_dtype)
        known = mirror.copies.index_select(0, asked.slots)
        sent = compress_changes(now, known, self._theirs[peer], mirror.thresholds, module.guard, scale=-1)
        add_entries(mirror.copies, asked.slots, sent.positions, sent.received)
        module.traffic.add(entries_sent=sent.positions.numel(), entries=now.numel())
        return sent.payload

    def _gradient_payload(self, owner: int, gradient: Tensor) -> Tensor:
        module = self._module
        held, slots = self._held(owner)
        rows = held.residual.index_select(0, slots)
        sent = compress_changes(rows, gradient, self._mine[owner], held.thresholds, module.guard)
        flat = rows.view(-1)
        left = torch.where(sent.left.isfinite(), sent.left, flat.index_select(0, sent.positions))
        held.residual.index_copy_(0, slots, flat.index_copy_(0, sent.positions, left).view_as(rows))
        module.traffic.add(entries_sent=sent.positions.numel(), entries=gradient.numel())
        return sent.payload

    def _held(self, owner: int) -> tuple[RememberedRows, Tensor]:
        """What is remembered of an owner's rows, and where the rows of this look-up still are."""
        held, slots = self._module.held[owner], self._slots[owner]
        if not held.cache.holds(self._rows.wanted[owner], slots.cpu().numpy()):
            raise RuntimeError(
                "Rows were evicted between a request and its backward: with several requests before a backward,"
                f" `cache_rows` ({self._module.cache_rows}) must hold the rows of all of them. Raise it."
            )
        return held, slots

    def _message(self, owner: int, places: Int64Array) -> Message:
        module = self._module
        tables = module.placement.tables_of(owner, places)
        return message_about(tables, module.embedding_dim, module.annealed(module.density), module.value_format)

    def _read(self, peer: int, payload: Tensor, message: Message) -> tuple[Tensor, Tensor]:
        try:
            return read_changes(payload, message)
        except PayloadError as error:
            raise PayloadError(f"Embedding rows from rank {peer} of the process group: {error}.") from error

    def _count(self) -> None:
        """Count what fp32 rows both ways and int64 ids of every look-up would put on the wire from this rank."""
        row_bytes = FP32_BYTES * self._module.embedding_dim
        mine = int(sum(self._rows.lookups[peer] for peer in self._peers))
        theirs = sum(asked.lookups for asked in self._asked.values())
        self._module.traffic.add(steps=1, bytes_dense=mine * (ID_BYTES + row_bytes) + theirs * row_bytes)
