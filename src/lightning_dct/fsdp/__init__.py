"""FSDP2 replicas, sharded inside a node, that exchange compressed updates of their shards between
nodes.
"""
