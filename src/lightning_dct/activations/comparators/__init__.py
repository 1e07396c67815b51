"""Other ways to compress what crosses a border, to compare a split point with: each stands where it stands.

The families of Bian et al., *Does Compressing Activations Help Model Parallel Training?*, MLSys 2024, and low rank:

==================  ================================================================================================
family              here
==================  ================================================================================================
top-k               ``SplitPoint(density=..., refresh_every=1, guard=False)``: the largest of every step, exactly
                    (with several micro-batches a step, ``scope="sample"``: the largest of every sample)
random-k            :class:`RandomSplit`
quantisation        ``SplitPoint(density=1.0, forward_format="int4", backward_format="int4")``, one scale a row; or
                    ``"int8"``, ``"int2"``
learned code        :func:`autoencoder`: two linear layers, trained with the model
low rank            :class:`LowRankSplit`: a subspace that follows the activations
==================  ================================================================================================

All of them work in one process, cross between the stages of a pipeline, and are counted in the same way. ``density``
is the share of the activations' entries of which numbers are sent, each way; positions and bases come on top.
"""

from lightning_dct.activations.comparators.autoencoder import CodePoint, autoencoder
from lightning_dct.activations.comparators.low_rank import LowRankSplit
from lightning_dct.activations.comparators.random_k import RandomSplit

__all__ = ["CodePoint", "LowRankSplit", "RandomSplit", "autoencoder"]
