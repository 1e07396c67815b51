"""Exchanges: how compressed tensors reach the other ranks."""
