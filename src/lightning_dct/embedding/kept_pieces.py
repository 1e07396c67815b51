"""Rows as long as they need to be: which quarters of each row are stored, and where.

A quarter of a row is called a piece here. A piece that is not kept has its initial value, which a hash computes, so it
takes no memory; its gradients are dropped. Kept pieces follow one another in ``weight``, in the order of their rows::

    row 0   [ a | b | c | d ]        masks     weight
    row 1   [ e | f | g | h ]        0101      a        shape [kept pieces, embedding_dim / 4]
    row 2   [ i | j | k | l ]        0000      c
                                     0010      j
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_dct.embedding.owners import Int64Array

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
        self.num_rows = masks.size
        self._blocks = np.zeros((-(-masks.size // _BLOCK), _BLOCK), dtype=np.uint8)
        self._blocks.reshape(-1)[: masks.size] = masks
        self._starts = np.concatenate([[0], _NUM_KEPT[self._blocks].sum(axis=1, dtype=np.int64).cumsum()])

    @property
    def num_pieces(self) -> int:
        """The number of kept pieces."""
        return int(self._starts[-1])

    @property
    def masks(self) -> npt.NDArray[np.uint8]:
        """The masks, ``[rows]``."""
        return self._blocks.reshape(-1)[: self.num_rows]

    def find(self, places: Int64Array) -> tuple[Tensor, Tensor]:
        """Find the kept pieces of the rows at ``places``, ``[k]``.

        Returns:
            Their numbers among all ``PIECES * k`` pieces of these rows, ascending, and their places among kept pieces.
        """
        block, within = np.divmod(places, _BLOCK)
        masks = self._blocks[block]
        before = np.where(np.arange(_BLOCK) < within[:, None], _NUM_KEPT[masks], 0).sum(axis=1, dtype=np.int64)
        kept = masks[np.arange(places.size), within][:, None] >> np.arange(PIECES) & 1
        found = np.flatnonzero(kept)
        at = (self._starts[block] + before)[:, None] + kept.cumsum(axis=1) - 1
        return torch.from_numpy(found), torch.from_numpy(at.reshape(-1)[found])

    def expand(self, values: Tensor, places: Int64Array, rows: Tensor) -> Tensor:
        """Write the kept pieces of the rows at ``places`` into ``rows``, ``[k, ...]``, and return it.

        ``values`` is ``[kept pieces, ...]``.
        """
        found, at = (part.to(values.device) for part in self.find(places))
        rows.view(-1, *values.shape[1:])[found] = values[at]
        return rows

    def pack(self, values: Tensor, places: Int64Array, rows: Tensor) -> None:
        """Write the kept pieces of ``rows``, ``[k, ...]``, into ``values``: the opposite of :meth:`expand`."""
        found, at = (part.to(values.device) for part in self.find(places))
        values[at] = rows.reshape(-1, *values.shape[1:])[found]
