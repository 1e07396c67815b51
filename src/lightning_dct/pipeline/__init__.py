"""Stages of a model on several ranks: compressed activations between them, compressed updates between replicas.

mesh         ranks and process groups          schedule    runs pieces with torch.distributed.pipelining
placement    cuts the model, places pieces     results     the last stage's loss, logs and metrics
borders      sends activations and gradients   sequential  a network with keywords
steps        the user's steps and logs
runner       the steps over the pipeline, and the schedule's gradients for DDP
"""
