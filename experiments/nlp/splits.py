"""What may stand between two pieces of a transformer, by name: ``model.split.kind``."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_dct import SplitPoint, subspace
from lightning_dct.activations.layout import entries_at
from lightning_dct.activations.subspace import Anchored
from nlp.comparators import RandomSplit, autoencoder

# What a kind settles itself, in place of what the configuration says.
SETTLED: dict[str, dict[str, Any]] = {
    "subspace": {},
    "bottleneck": {},
    "threshold": {},
    "top_k": {"refresh_every": 1, "guard": False},
    "quantised": {"density": 1.0},
    "random": {},
    "autoencoder": {},
}
# Settings of thresholds, with the values that switch them off: codes do without.
OF_THRESHOLDS: dict[str, Any] = {"exploration": 0.0, "select_by": "magnitude", "warmup_steps": 0}


def make_split(width: int, num_tokens: int, kind: str = "subspace", **settings: Any) -> dict[str, nn.Module]:
    """Make what stands between two pieces.

    Args:
        width: Size of the hidden state, the last dimension of what crosses.
        num_tokens: Size of the vocabulary.
        kind: A key of ``SETTLED``: ``"subspace"`` is :func:`lightning_dct.subspace`, ``"bottleneck"`` the same without
            what the receiver knows of the tokens; for the others see :mod:`nlp.comparators`.
        **settings: As ``lightning_dct.SplitPoint`` takes them. Of a subspace, a bottleneck and an autoencoder
            ``density`` is the width of what crosses over that of the model.

    Returns:
        One module, under the name ``""``; of codes three, in their order.

    Raises:
        ValueError: There is no such kind, or a setting is on that it does not have.
    """
    if kind not in SETTLED:
        raise ValueError(f"model.split.kind={kind}: choose one of {', '.join(SETTLED)}")
    settings |= SETTLED[kind]
    if kind in ("threshold", "top_k", "quantised"):
        return {"": SplitPoint(**settings)}
    if kind == "random":
        return {"": RandomSplit(**settings)}
    # There is nothing to refresh, whatever is said about when.
    settings.pop("refresh_every", None)
    for name, off in OF_THRESHOLDS.items():
        if settings.pop(name, off) != off:
            raise ValueError(f"model.split.{name} is about thresholds: leave it at {off} with model.split.kind={kind}")
    rank = entries_at(settings.pop("density"), width)
    if kind == "autoencoder":
        modules = autoencoder(width, rank, **settings)
    else:
        modules = subspace(width, rank, num_tokens if kind == "subspace" else None, **settings)
    return dict(zip(("_encoder", "", "_decoder"), modules, strict=True))


def reads_tokens(network: nn.Sequential) -> bool:
    """Whether a piece of the network must be told the tokens again, by the keyword ``tokens``."""
    return any(isinstance(child, Anchored) for child in network)
