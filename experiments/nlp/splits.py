"""The split points between two pieces of a transformer, by name: ``model.split.kind``.

Beside the subspace, the four families of Bian et al., *Does Compressing Activations Help Model
Parallel Training?*, MLSys 2024: ``top_k``, ``random``, ``quantised``, and a learned code,
``autoencoder``.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_dct import SplitPoint, subspace
from lightning_dct.activations.codec import ActivationLayout, mixed_seed
from lightning_dct.activations.split_point import Anchored
from lightning_dct.compress.threshold import entries_at


class RandomSplit(SplitPoint):
    """Sends random entries, others in each step.

    They are not scaled up, as in Bian et al. Positions are sent, too.
    """

    def select(self, layout: ActivationLayout, activations: Tensor) -> Tensor | None:
        """Random positions of this step, ascending, int64; None for all."""
        if layout.sends_everything:
            return None
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.completed_steps))
        chosen = torch.randperm(layout.numel, generator=generator)[: layout.capacity]
        return chosen.sort().values.to(activations.device)


KINDS: dict[str, Any] = {
    "threshold": SplitPoint,
    "top_k": lambda **settings: SplitPoint(**{**settings, "refresh_every": 1}),
    "quantised": lambda **settings: SplitPoint(**{**settings, "density": 1.0}),
    "random": RandomSplit,
}
"""Kinds of one module; the others have three."""
CODES = ("subspace", "bottleneck", "autoencoder")


def make_split(
    width: int, num_tokens: int, kind: str = "subspace", **settings: Any
) -> dict[str, nn.Module]:
    """Make the split point between two pieces.

    Args:
        width: Size of the hidden state, the last dimension of the activations.
        num_tokens: Size of the vocabulary.
        kind: A key of ``KINDS`` or one of ``CODES``: ``"subspace"`` is
            :func:`lightning_dct.subspace`, ``"bottleneck"`` the same without anchors of the tokens,
            and ``"autoencoder"`` a bottleneck whose matrices are trained.
        **settings: Those of ``lightning_dct.SplitPoint``. For codes ``density`` is their width over
            that of the model.

    Returns:
        One module, under the name ``""``; for codes three, in their order.
    """
    if kind in KINDS:
        return {"": KINDS[kind](**settings)}
    if kind not in CODES:
        raise ValueError(f"model.split.kind={kind}: choose one of {', '.join((*CODES, *KINDS))}")
    # Codes have no thresholds to refresh.
    settings.pop("refresh_every", None)
    rank = entries_at(settings.pop("density"), width)
    encoder, point, decoder = subspace(
        width, rank, num_tokens if kind == "subspace" else None, **settings
    )
    if kind == "autoencoder":
        encoder.requires_grad_()
        decoder.requires_grad_()
    return {"_encoder": encoder, "": point, "_decoder": decoder}


def reads_tokens(network: nn.Sequential) -> bool:
    """Whether a piece of the network needs the tokens again, by the keyword ``tokens``."""
    return any(isinstance(child, Anchored) for child in network)
