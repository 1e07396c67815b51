"""Prunes rows in training: keeps the quarters of rows that matter most, and their optimizer state.

The score of a quarter is how often its row was requested, times the squared distance from its initial value. A quarter
that is not kept goes back to that value. Pruning pieces of rows in training is from Luo et al., *Fine-Grained Embedding
Dimension Optimization During Training for Recommender Systems* (FIITED), arXiv 2401.04408, 2024.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dct.compress.threshold import kth_magnitude
from lightning_dct.embedding.kept_pieces import INDEX_BYTES_A_ROW, PIECES, KeptPieces
from lightning_dct.embedding.owners import Int64Array
from lightning_dct.embedding.state import ROWS_AT_A_TIME, TableState, is_row_state


@torch.no_grad()
def prune(module: TableState, keep: float, optimizers: Iterable[Optimizer]) -> float:
    """Keep the pieces of this rank's rows with the largest scores, and their optimizer states.

    Returns:
        The share of the rows' bytes that this rank has left, with the index of kept pieces.
    """
    rows, width = module.weight.shape
    row_bytes = width * module.weight.element_size()
    budget = int((keep * row_bytes - INDEX_BYTES_A_ROW) * rows / (row_bytes / PIECES))
    scores = torch.cat([torch.empty(0, PIECES), *(_scores(module, part) for part in _parts(rows))])
    least = kth_magnitude(scores.view(-1), budget + 1) if budget < scores.numel() else 0.0
    bits = torch.tensor([1 << piece for piece in range(PIECES)], dtype=torch.uint8)
    masks = torch.cat([((part > least) * bits).sum(dim=1, dtype=torch.uint8) for part in scores.split(ROWS_AT_A_TIME)])
    kept = KeptPieces(masks.numpy())
    weight = module.weight
    for state in (optimizer.state[weight] for optimizer in optimizers if weight in optimizer.state):
        for name, value in state.items():
            if is_row_state(value, weight):
                state[name] = _packed(kept, value, width)
    packed = _packed(kept, weight.detach(), width)
    gradient = None if weight.grad is None else _packed(kept, weight.grad, width)
    weight.grad = None  # else torch refuses the new shape
    weight.data, weight.grad = packed, gradient
    module.kept, module.row_requests = kept, None
    module.rows_replaced()
    return (kept.num_pieces * row_bytes / PIECES + INDEX_BYTES_A_ROW * rows) / max(rows * row_bytes, 1)


def _scores(module: TableState, places: Int64Array) -> Tensor:
    """The scores of the pieces of some rows, fp32 ``[k, PIECES]`` on the CPU."""
    assert module.row_requests is not None
    initial = module.initial(module.exchange_group.rank, places)
    moved = (module.own_rows(places).float() - initial.float()).cpu()
    squares = moved.view(places.size, PIECES, module.embedding_dim // PIECES).square().sum(dim=2)
    return squares * module.row_requests[torch.from_numpy(places)].unsqueeze(1)


def _packed(kept: KeptPieces, value: Tensor, width: int) -> Tensor:
    """The kept pieces of a value for each row: ``[rows, width]``; of another shape, all of a row's pieces get it."""

    def by_pieces(rows: Tensor) -> Tensor:
        if rows.ndim == 2 and rows.shape[1] == width:
            return rows.reshape(len(rows), PIECES, width // PIECES)
        return rows.unsqueeze(1).expand(-1, PIECES, *rows.shape[1:])

    if value.is_sparse:
        value = value.coalesce()
        found, at = (part.to(value.device) for part in kept.find(value.indices()[0].cpu().numpy()))
        pieces = by_pieces(value.values()).flatten(0, 1)[found]
        shape = (kept.num_pieces, *pieces.shape[1:])
        return torch.sparse_coo_tensor(at.unsqueeze(0), pieces, shape, is_coalesced=True, check_invariants=False)
    packed = value.new_empty(kept.num_pieces, *by_pieces(value[:0]).shape[2:])
    for places in _parts(len(value)):
        kept.pack(packed, places, by_pieces(value[places[0] : places[-1] + 1]).flatten(0, 1))
    return packed


def _parts(rows: int) -> Iterator[Int64Array]:
    for low in range(0, rows, ROWS_AT_A_TIME):
        yield np.arange(low, min(low + ROWS_AT_A_TIME, rows))
