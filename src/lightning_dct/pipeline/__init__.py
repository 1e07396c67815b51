"""Stages of a model on several ranks: compressed activations between them, compressed updates between replicas.

mesh         which rank holds what             schedule    torch.distributed.pipelining runs the pieces
placement    cuts the model, places pieces     delivery    the schedule's gradients, handed to DDP
borders      what crosses, as autograd sees it gathering   many stages, one checkpoint
receiving    asks early for what will arrive   telling     the loss, asked for early
steps        the user's steps and logs         sequential  a network with keywords
"""

from lightning_dct.pipeline.sequential import SplitSequential
from lightning_dct.pipeline.strategy import DCTPipelineStrategy

__all__ = ["DCTPipelineStrategy", "SplitSequential"]
