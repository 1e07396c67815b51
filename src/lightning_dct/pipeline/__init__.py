"""Stages of a model on several ranks: compressed activations between them, compressed updates between replicas.

mesh         ranks and process groups          schedule    runs pieces with torch.distributed.pipelining
placement    cuts the model, places pieces     delivery    gives the schedule's gradients to DDP
borders      sends activations and gradients   results     the last stage's loss, logs and metrics
steps        the user's steps and logs         sequential  a network with keywords
runner       the steps over the pipeline       checks      of settings and models
"""

from lightning_dct.pipeline.sequential import SplitSequential
from lightning_dct.pipeline.strategy import DCTPipelineStrategy

__all__ = ["DCTPipelineStrategy", "SplitSequential"]
