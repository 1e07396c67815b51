"""One training look-up through values, the paper's method: pooled embeddings cross, all but the largest entries zero.

    rank that uses bags                                           rank that owns rows of their tables

      ids of every look-up  ------------------------------------>  pool to h [samples, tables, d]
      h * M                 <--------  h under M = |h| >= tau  ---
      the rest of the model runs
      dL/dh                 --------  under the same M  --------->  the sum over all ranks is the rows' gradient

This is a baseline: nothing is remembered, and what is below the threshold is lost (Gupta et al., KDD 2021, section
3.2). A rank masks its own rows, too, so that a model sees one kind of activations.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_dct.activations.codec import decode_backward, decode_forward, encode_backward
from lightning_dct.activations.layout import ActivationLayout
from lightning_dct.embedding.bags import Bags
from lightning_dct.embedding.exchange import reading
from lightning_dct.embedding.gradients import deliver, when_backward_ends
from lightning_dct.embedding.placement import Int64Array
from lightning_dct.embedding.state import TableState
from lightning_dct.traffic import FP32_BYTES, ID_BYTES
from lightning_dct.wire import PayloadError


class Asked(NamedTuple):
    """What another rank requests.

    Attributes:
        places: Shape ``[lookups]``: the rows.
        bags: Shape ``[lookups]``: the bag of each, of ``samples * tables here``.
        samples: Samples of that rank.
        positions: The positions of the entries that were sent; None for all.
    """

    places: Tensor
    bags: Tensor
    samples: int
    positions: Tensor | None


class ValuesLookup:
    """A look-up under way: the constructor requests and answers, :meth:`pooled` waits for the answers."""

    def __init__(self, module: TableState, bags: Bags) -> None:
        self._module, self._bags = module, bags
        world = range(module.placement.world_size)
        self._tables = [module.placement.tables_on(rank) for rank in world]
        with module.traffic.timed():
            owners, places = module.placement.locate(bags.tables, bags.rows)
            payloads = [self._ask(rank, places[owners == rank], owners == rank) for rank in world]
            lookups = np.bincount(owners, minlength=len(world))
            numbers = np.array([[bags.num_samples, lookups[rank], len(payloads[rank])] for rank in world], np.int64)
        samples, asked, sizes = module.exchange_group.announce(numbers, module.traffic).T.tolist()
        requests = module.exchange_group.start(payloads, sizes, module.traffic).wait()
        with module.traffic.timed():
            self._asked: list[Asked] = []
            answers = [self._answer(rank, requests[rank], samples[rank], asked[rank]) for rank in world]
            self._layouts = [self._layout(rank, bags.num_samples) for rank in world]
            sizes = [layout.forward_positions_bytes + layout.forward_values_bytes for layout in self._layouts]
        mine = int(lookups.sum() - lookups[module.exchange_group.rank])
        theirs = sum(asked) - asked[module.exchange_group.rank]
        row_bytes = FP32_BYTES * module.embedding_dim
        module.traffic.add(steps=1, bytes_dense=mine * (ID_BYTES + row_bytes) + theirs * row_bytes)
        self._incoming = module.exchange_group.start(answers, sizes, module.traffic)

    def pooled(self) -> Tensor:
        """Wait for the pooled embeddings: shape ``[samples, tables, dim]``."""
        module, bags = self._module, self._bags
        answers = self._incoming.wait()
        with module.traffic.timed():
            dtype = module.weight.dtype
            pooled = module.weight.new_zeros(bags.num_samples, bags.num_tables, module.embedding_dim)
            self._positions: list[Tensor | None] = []
            for rank, (layout, answer) in enumerate(zip(self._layouts, answers, strict=True)):
                cut = layout.forward_positions_bytes
                with reading(f"Embeddings from rank {rank} of the process group"):
                    part, positions = decode_forward(layout, answer[:cut], answer[cut:], dtype)
                # Rows of one table may come from several ranks.
                pooled[:, self._tables[rank]] += part
                self._positions.append(positions)
            if bags.divisors is not None:
                pooled /= bags.divisors.view(bags.num_samples, bags.num_tables, 1)
        return deliver(module.weight, pooled, self.send_gradient)

    def send_gradient(self, pooled_gradient: Tensor) -> None:
        """Start sending each owner the gradient of what it sent, and receive this rank's when backward ends."""
        module, bags = self._module, self._bags
        with module.traffic.timed():
            if bags.divisors is not None:
                pooled_gradient = pooled_gradient / bags.divisors.view(bags.num_samples, bags.num_tables, 1)
            # The seed with which the owners round this rank's batch.
            seed = module.splits[module.exchange_group.rank].rounding_seed
            payloads = [
                encode_backward(layout, pooled_gradient[:, tables].contiguous(), positions, seed)
                for layout, tables, positions in zip(self._layouts, self._tables, self._positions, strict=True)
            ]
            here = module.exchange_group.rank
            theirs = [self._layout(here, asked.samples) for asked in self._asked]
        incoming = module.exchange_group.start(payloads, [layout.backward_bytes for layout in theirs], module.traffic)

        def finish() -> None:
            received = incoming.wait()
            with module.traffic.timed():
                for asked, layout, payload in zip(self._asked, theirs, received, strict=True):
                    gradient = decode_backward(layout, payload, asked.positions, module.remembered_dtype)
                    rows = gradient.reshape(-1, module.embedding_dim)[asked.bags]
                    module.collected.add(asked.places, rows)
                module.collected.deliver(module.weight, module.placement.world_size)

        when_backward_ends(finish)

    def _ask(self, owner: int, places: Int64Array, chosen: np.typing.NDArray[np.bool_]) -> Tensor:
        """A request, as :func:`read_request` reads it."""
        bags, module = self._bags, self._module
        tables = self._tables[owner]
        width = _width(module.placement.owned_rows[owner])
        flat = np.arange(bags.rows.size) if bags.bags is None else bags.bags.cpu().numpy()
        column = np.searchsorted(tables, bags.tables[chosen])
        within = flat[chosen] // bags.num_tables * len(tables) + column
        order = np.argsort(within, kind="stable")
        ids = places[order].astype("<u8")[:, None].view(np.uint8)[:, :width]
        counts = np.bincount(within, minlength=bags.num_samples * len(tables)).astype("<u4")
        # Most data have one row in every bag: then the counts are left out.
        count_bytes = counts.view(np.uint8) if (counts != 1).any() else np.empty(0, dtype=np.uint8)
        data = np.concatenate([ids.reshape(-1), count_bytes])
        return torch.from_numpy(data).to(module.weight.device)

    def _answer(self, peer: int, request: Tensor, samples: int, lookups: int) -> Tensor:
        module = self._module
        here = module.exchange_group.rank
        tables = self._tables[here]
        num_bags = samples * len(tables)
        with reading(f"Rank {peer} of the process group"):
            asked = read_request(request.cpu().numpy(), lookups, num_bags, len(module.weight))
        places, bags = (torch.from_numpy(part).to(module.weight.device) for part in asked)
        pooled = module.weight.new_zeros(num_bags, module.embedding_dim)
        pooled.index_add_(0, bags, module.weight.detach()[places])
        encoded = module.splits[peer].encode_forward(pooled.view(samples, len(tables), module.embedding_dim))
        self._asked.append(Asked(places, bags, samples, encoded.positions))
        sent = pooled.numel() if encoded.positions is None else encoded.positions.numel()
        module.traffic.add(entries_sent=2 * sent, entries=2 * pooled.numel())
        return torch.cat([encoded.positions_payload, encoded.values_payload])

    def _layout(self, owner: int, samples: int) -> ActivationLayout:
        shape = (samples, len(self._tables[owner]), self._module.embedding_dim)
        return self._module.splits[owner].layout(shape)


def read_request(
    data: np.typing.NDArray[np.uint8], lookups: int, num_bags: int, num_rows: int
) -> tuple[Int64Array, Int64Array]:
    """Read another rank's request.

    Args:
        data: uint8: the place of every look-up, in as few whole bytes as ``num_rows`` needs, then the number of
            look-ups in each bag, in four bytes each, or nothing when it is always one.
        lookups: Their number.
        num_bags: The bags they go into.
        num_rows: The rows of this rank.

    Returns:
        The place and the bag of each look-up, both shape ``[lookups]``.

    Raises:
        PayloadError: The bytes are not that.
    """
    width = _width(num_rows)
    count_bytes = data[lookups * width :]
    if data.size < lookups * width or count_bytes.size not in (0, 4 * num_bags):
        raise PayloadError(f"a request for {lookups} rows in {num_bags} bags has {data.size} bytes")
    ids = np.zeros((lookups, 8), dtype=np.uint8)
    ids[:, :width] = data[: lookups * width].reshape(lookups, width)
    places = ids.view("<u8").reshape(-1).astype(np.int64)
    counts = count_bytes.copy().view("<u4").astype(np.int64) if count_bytes.size else np.ones(num_bags, dtype=np.int64)
    if counts.sum() != lookups or (places.size and (places.min() < 0 or places.max() >= num_rows)):
        raise PayloadError("a request asks for rows that are not there")
    return places, np.repeat(np.arange(num_bags), counts)


def _width(rows: int) -> int:
    """Whole bytes that hold the place of a row."""
    return (max(rows - 1, 1).bit_length() + 7) // 8
