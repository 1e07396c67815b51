"""Compressed activations between ranks, and their gradients at the same entries."""
