"""Stages of a model on several ranks: compressed activations between them, compressed updates between replicas.

mesh         ranks and process groups          schedule    runs pieces with torch.distributed.pipelining
placement    cuts the model, places pieces     delivery    gives the schedule's gradients to DDP
borders      sends activations and gradients   gathering   many stages, one checkpoint
steps        the user's steps and logs         results     the last stage's loss, logs and metrics
runner       the steps over the pipeline       sequential  a network with keywords
"""

from lightning_dct.pipeline.sequential import SplitSequential
from lightning_dct.pipeline.strategy import DCTPipelineStrategy

__all__ = ["DCTPipelineStrategy", "SplitSequential"]
