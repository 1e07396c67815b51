"""Sharded inside a node, thresholded between nodes: FSDP2 replicas that exchange what their shards have moved.

mesh       replicas x shards, and a checkpoint of one replica    weights    both sets of weights, in FSDP's memory
wrapping   fully_shard, for a module that does not do it itself  gradients  the step between replicas of a backward
state      what a rank saves, cut anew for another mesh          strategy   Lightning's side of it
"""

from lightning_dct.fsdp.strategy import DCTFSDPStrategy

__all__ = ["DCTFSDPStrategy"]
