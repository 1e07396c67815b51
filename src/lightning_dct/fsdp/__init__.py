"""FSDP2 replicas, sharded inside a node, that exchange compressed updates of their shards between nodes."""

from lightning_dct.fsdp.fsdp_strategy import DCTFSDPStrategy

__all__ = ["DCTFSDPStrategy"]
