"""Stages of a model on several ranks: compressed activations between them, compressed updates between replicas.

mesh         which rank holds what           crossing    the two ends of a border, as autograd functions
partition    cuts the model at split points  schedule    torch.distributed.pipelining runs the pieces
borders      shapes that cross               delivery    the schedule's gradients, handed to DDP
steps        the user's steps and logs       gathering   many stages, one checkpoint
placement    where pieces live               sequential  a network with keywords
"""

from lightning_dct.pipeline.sequential import SplitSequential
from lightning_dct.pipeline.strategy import DCTPipelineStrategy

__all__ = ["DCTPipelineStrategy", "SplitSequential"]
