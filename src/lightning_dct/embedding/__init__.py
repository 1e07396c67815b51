"""Embedding tables over ranks: placement, caches of remembered rows, messages of changes, the
module around them.
"""
