"""Stages of a model on several ranks: compressed activations between them, compressed updates
between replicas.
"""
