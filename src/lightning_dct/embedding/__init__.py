"""Embedding tables over ranks: placement, caches of remembered rows, messages of changes, the module around them."""

from lightning_dct.embedding.growing import GrowingEmbeddingBags
from lightning_dct.embedding.optimizers import RowWiseAdagrad
from lightning_dct.embedding.sharded import ShardedEmbeddingBags

__all__ = ["GrowingEmbeddingBags", "RowWiseAdagrad", "ShardedEmbeddingBags"]
