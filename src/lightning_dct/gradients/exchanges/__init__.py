"""How compressed gradients get to the other ranks: by all-gather, sharded, or by node."""

from lightning_dct.gradients.exchanges.all_gather import AllGather
from lightning_dct.gradients.exchanges.base import Bucket, Exchange, Flow
from lightning_dct.gradients.exchanges.by_node import ByNode
from lightning_dct.gradients.exchanges.making import make_exchange
from lightning_dct.gradients.exchanges.nodes import NodeLayout
from lightning_dct.gradients.exchanges.sharded import Sharded

__all__ = ["AllGather", "Bucket", "ByNode", "Exchange", "Flow", "NodeLayout", "Sharded", "make_exchange"]
