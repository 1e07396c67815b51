"""FSDP2 replicas, sharded inside a node, that exchange compressed updates of their shards between nodes.

mesh       replicas x shards, and a checkpoint of one replica    weights    both sets of weights, in FSDP's memory
wrapping   fully_shard, for a module that does not do it itself  gradients  the exchange in a backward
strategy   Lightning's side of it
"""

from lightning_dct.fsdp.strategy import DCTFSDPStrategy

__all__ = ["DCTFSDPStrategy"]
