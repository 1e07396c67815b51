"""Stages of a model on several ranks: compressed activations between them, compressed updates between replicas.

mesh         ranks, groups; results of the last stage    schedule    runs pieces with torch.distributed.pipelining
placement    cuts the model, places pieces               sequential  a network with keywords
borders      sends activations and gradients             steps       the user's steps and logs
runner       the steps over the pipeline, and the schedule's gradients for DDP
"""
