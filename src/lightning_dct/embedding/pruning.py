"""Rows as long as they need to be: which quarters of each row are stored, and where; and the choice
of them.

A quarter of a row is called a piece here. A piece that is not kept has its initial value, which a
hash computes, so it takes no memory; its gradients are dropped. Kept pieces follow one another in
``weight``, in the order of their rows::

    row 0   [ a | b | c | d ]        masks     weight
    row 1   [ e | f | g | h ]        0101      a        shape [kept pieces, embedding_dim / 4]
    row 2   [ i | j | k | l ]        0000      c
                                     0010      j

Pruning, in the middle of training, keeps the pieces with the largest scores, and the optimizer's
state of them. The score is how often the row was requested, times the squared distance of the piece
from its initial value. Pruning pieces of rows in training is from Luo et al., *Fine-Grained
Embedding Dimension Optimization During Training for Recommender Systems* (FIITED), arXiv
2401.04408, 2024.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dct.compress.awaited import to_device
from lightning_dct.compress.threshold import kth_magnitude
from lightning_dct.embedding.owners import ROWS_AT_A_TIME, Int64Array, in_parts

if TYPE_CHECKING:
    from lightning_dct.embedding.sharded import ShardedEmbeddingBags

PIECES = 4
# Rows that share one entry of the index.
_BLOCK = 16
_NUM_KEPT = np.array([mask.bit_count() for mask in range(1 << PIECES)], dtype=np.uint8)
# A byte for the mask of each row, and eight for the start of each block.
INDEX_BYTES_A_ROW = 1 + 8 / _BLOCK


class KeptPieces:
    """Which pieces of each row are kept, and where they are.

    ``masks`` has shape ``[rows]``, uint8: bit ``i`` says that piece ``i`` is kept.
    """

    def __init__(self, masks: npt.NDArray[np.uint8]) -> None:
        self._blocks = np.zeros((-(-masks.size // _BLOCK), _BLOCK), dtype=np.uint8)
        self._blocks.reshape(-1)[: masks.size] = masks
        self.masks = self._blocks.reshape(-1)[: masks.size]  # a view
        self._starts = np.concatenate(
            [[0], _NUM_KEPT[self._blocks].sum(axis=1, dtype=np.int64).cumsum()]
        )
        self.num_pieces = int(self._starts[-1])  # that are kept

    def find(self, places: Int64Array) -> tuple[Tensor, Tensor]:
        """Find the kept pieces of the rows at ``places``, ``[k]``.

        Returns:
            Their numbers among all ``PIECES * k`` pieces of these rows, ascending, and their places
            among kept pieces.
        """
        block, within = np.divmod(places, _BLOCK)
        masks = self._blocks[block]
        before = np.where(np.arange(_BLOCK) < within[:, None], _NUM_KEPT[masks], 0).sum(
            axis=1, dtype=np.int64
        )
        kept = masks[np.arange(places.size), within][:, None] >> np.arange(PIECES) & 1
        found = np.flatnonzero(kept)
        at = (self._starts[block] + before)[:, None] + kept.cumsum(axis=1) - 1
        return torch.from_numpy(found), torch.from_numpy(at.reshape(-1)[found])

    def expand(self, values: Tensor, places: Int64Array, rows: Tensor) -> Tensor:
        """Write the kept pieces of the rows at ``places`` into ``rows``, ``[k, ...]``, and return
        it.

        ``values`` is ``[kept pieces, ...]``.
        """
        found, at = (to_device(part, values.device) for part in self.find(places))
        rows.view(-1, *values.shape[1:])[found] = values[at]
        return rows

    def compact(self, values: Tensor, places: Int64Array, rows: Tensor) -> None:
        """Write the kept pieces of ``rows``, ``[k, ...]``, into ``values``: the opposite of
        :meth:`expand`.
        """
        found, at = (to_device(part, values.device) for part in self.find(places))
        values[at] = rows.reshape(-1, *values.shape[1:])[found]


@torch.no_grad()
def prune(module: ShardedEmbeddingBags, keep: float, optimizers: Iterable[Optimizer]) -> float:
    """Keep the pieces of this rank's rows with the largest scores, and their optimizer states.

    The result is the share of the rows' bytes that this rank has left, with the index of kept
    pieces.
    """
    rows, width = module.weight.shape
    row_bytes = width * module.weight.element_size()
    budget = int((keep * row_bytes - INDEX_BYTES_A_ROW) * rows / (row_bytes / PIECES))
    scores = torch.cat(
        [torch.empty(0, PIECES), *(_scores(module, part) for part in in_parts(0, rows))]
    )
    least = kth_magnitude(scores.view(-1), budget + 1) if budget < scores.numel() else 0.0
    bits = torch.tensor([1 << piece for piece in range(PIECES)], dtype=torch.uint8)
    masks = torch.cat(
        [
            ((part > least) * bits).sum(dim=1, dtype=torch.uint8)
            for part in scores.split(ROWS_AT_A_TIME)
        ]
    )
    kept = KeptPieces(masks.numpy())
    weight = module.weight
    for state in (optimizer.state[weight] for optimizer in optimizers if weight in optimizer.state):
        for name, value in state.items():
            if is_row_state(value, weight):
                state[name] = _packed(kept, value, width)
    packed = _packed(kept, weight.detach(), width)
    gradient = None if weight.grad is None else _packed(kept, weight.grad, width)
    weight.grad = None  # else torch refuses the new shape
    weight.data = packed
    weight.grad = gradient
    module.kept = kept
    module.row_requests = None
    module.rows_replaced()
    return (kept.num_pieces * row_bytes / PIECES + INDEX_BYTES_A_ROW * rows) / max(
        rows * row_bytes, 1
    )


def _scores(module: ShardedEmbeddingBags, places: Int64Array) -> Tensor:
    """The scores of the pieces of some rows, fp32 ``[k, PIECES]`` on the CPU."""
    assert module.row_requests is not None
    initial = module.initial(module.exchange_group.rank, places)
    moved = (module.own_rows(places).float() - initial.float()).cpu()
    squares = moved.view(places.size, PIECES, module.embedding_dim // PIECES).square().sum(dim=2)
    return squares * module.row_requests[torch.from_numpy(places)].unsqueeze(1)


def _packed(kept: KeptPieces, value: Tensor, width: int) -> Tensor:
    """The kept pieces of a value for each row: ``[rows, width]``; of another shape, all of a row's
    pieces get it.
    """

    def by_pieces(rows: Tensor) -> Tensor:
        if rows.ndim == 2 and rows.shape[1] == width:
            return rows.reshape(len(rows), PIECES, width // PIECES)
        return rows.unsqueeze(1).expand(-1, PIECES, *rows.shape[1:])

    if value.is_sparse:
        value = value.coalesce()
        found, at = (part.to(value.device) for part in kept.find(value.indices()[0].cpu().numpy()))
        pieces = by_pieces(value.values()).flatten(0, 1)[found]
        shape = (kept.num_pieces, *pieces.shape[1:])
        return torch.sparse_coo_tensor(
            at.unsqueeze(0), pieces, shape, is_coalesced=True, check_invariants=False
        )
    packed = value.new_empty(kept.num_pieces, *by_pieces(value[:0]).shape[2:])
    for places in in_parts(0, len(value)):
        kept.compact(packed, places, by_pieces(value[places[0] : places[-1] + 1]).flatten(0, 1))
    return packed


def is_row_state(value: Any, weight: Tensor) -> bool:
    """Whether an entry of an optimizer's state has a row for each row of the weight."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == weight.shape[0]
