"""What may stand between two pieces of the language model, by name: ``model.split.kind``."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_dct import SplitPoint
from lightning_dct.activations.comparators import LowRankSplit, RandomSplit, autoencoder

# What a kind settles itself, in place of what the configuration says.
SETTLED: dict[str, dict[str, Any]] = {
    "threshold": {},
    "top_k": {"refresh_every": 1, "guard": False},
    "quantised": {"density": 1.0},
    "random": {},
    "low_rank": {},
    "autoencoder": {},
}
# Settings of thresholds, with the values that switch them off: other kinds do without.
OF_THRESHOLDS: dict[str, Any] = {"exploration": 0.0, "select_by": "magnitude"}


def make_split(width: int, kind: str = "threshold", **settings: Any) -> dict[str, nn.Module]:
    """Make what stands between two pieces.

    Args:
        width: Size of the hidden state, the last dimension of what crosses.
        kind: ``"threshold"``, ``"top_k"``, ``"quantised"``, ``"random"``, ``"low_rank"`` or ``"autoencoder"``; see
            :mod:`lightning_dct.activations.comparators`.
        **settings: As ``lightning_dct.SplitPoint`` takes them.

    Returns:
        One module, under the name ``""``; of an autoencoder three, in their order.

    Raises:
        ValueError: There is no such kind, or a setting is on that it does not have.
    """
    if kind not in SETTLED:
        raise ValueError(f"model.split.kind={kind}: choose one of {', '.join(SETTLED)}")
    settings |= SETTLED[kind]
    if kind in ("threshold", "top_k", "quantised"):
        return {"": SplitPoint(**settings)}
    # There is nothing to refresh, whatever is said about when.
    settings.pop("refresh_every", None)
    for name, off in OF_THRESHOLDS.items():
        if settings.pop(name, off) != off:
            raise ValueError(f"model.split.{name} is about thresholds: leave it at {off} with model.split.kind={kind}")
    if kind == "autoencoder":
        if settings.pop("warmup_steps", 0):
            raise ValueError(
                "model.split.warmup_steps: an autoencoder's code has one width from the first step on; set it to 0"
            )
        encoder, point, decoder = autoencoder(width, **settings)
        return {"_encoder": encoder, "": point, "_decoder": decoder}
    return {"": RandomSplit(**settings) if kind == "random" else LowRankSplit(**settings)}
