"""Exchanges: how compressed tensors reach the other ranks."""

from lightning_dct.gradients.exchanges.base import Exchange
from lightning_dct.gradients.exchanges.compressed import AllGather, ByNode, Sharded
from lightning_dct.gradients.exchanges.making import make_exchange

__all__ = ["AllGather", "ByNode", "Exchange", "Sharded", "make_exchange"]
