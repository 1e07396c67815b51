"""Which of the logged metrics tells the quality of a run, and which way is better, judged by its name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from lightning_dct.report.run import Run

HIGHER_IS_BETTER = (
    "auc", "auroc", "accuracy", "acc", "f1", "bleu", "chrf", "rouge", "precision", "recall", "map", "ndcg", "dice",
    "iou",
)  # fmt: skip
"""Words in the names of metrics of which more is better; the first are preferred."""

LOWER_IS_BETTER = ("loss", "perplexity", "ppl", "error", "nll", "mse", "rmse", "mae", "wer", "cer", "bits")
"""Words in the names of metrics of which less is better; the first are preferred."""

_VALIDATION = ("val", "valid", "validation", "eval", "dev")
_TRAINING = ("train", "training")


def words_of(name: str) -> list[str]:
    """The words of a metric's name.

    Example:
        >>> words_of("val/bits_per_byte")
        ['val', 'bits', 'per', 'byte']
    """
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]


def higher_is_better(name: str) -> bool | None:
    """Say whether more of a metric is better; None where its name does not tell."""
    words = words_of(name)
    if any(word in LOWER_IS_BETTER for word in words):
        return False
    return True if any(word in HIGHER_IS_BETTER for word in words) else None


def stage_of(name: str) -> str:
    """The part of the data a metric was measured on: ``train``, ``val``, ``test``, or nothing where it is not said."""
    for word in words_of(name):
        if word in _VALIDATION:
            return "val"
        if word in _TRAINING:
            return "train"
        if word == "test":
            return "test"
    return ""


def find_quality(runs: Sequence[Run]) -> str | None:
    """The metric that most runs have, of the validation where there is one, in the order of the words above.

    Args:
        runs: All that stand on one page.

    Returns:
        A logged name; None where nothing was validated or tested.
    """
    candidates = {
        name: how_many
        for name, how_many in logged_names(runs).items()
        if stage_of(name) in ("val", "test") and "best" not in words_of(name)
    }
    preferred = (*HIGHER_IS_BETTER, *LOWER_IS_BETTER)

    def rank(name: str) -> tuple[int, bool, int, int, str]:
        known = [preferred.index(word) for word in words_of(name) if word in preferred]
        return (
            -candidates[name],
            stage_of(name) != "val",
            min(known, default=len(preferred)),
            -_points(runs, name),
            name,
        )

    return min(candidates, key=rank, default=None)


def find_training_loss(runs: Sequence[Run]) -> str | None:
    """The loss of training steps: the one that most runs have, and of which most values were logged.

    Args:
        runs: All that stand on one page.
    """
    candidates = {
        name: how_many
        for name, how_many in logged_names(runs).items()
        if "loss" in words_of(name) and stage_of(name) in ("train", "")
    }
    return min(
        candidates,
        key=lambda name: (-candidates[name], stage_of(name) != "train", -_points(runs, name), name),
        default=None,
    )


def same_on_test(name: str, runs: Sequence[Run]) -> str | None:
    """The test part's metric of the same name, ``test/loss`` for ``val/loss``; None where there is none."""
    rest = [word for word in words_of(name) if word not in _VALIDATION]
    if stage_of(name) != "val":
        return None
    found = [other for other in logged_names(runs) if words_of(other) == ["test", *rest]]
    return found[0] if found else None


def logged_names(runs: Sequence[Run]) -> Counter[str]:
    """How many runs have logged each name, those of the compression left out."""
    return Counter(name for run in runs for name in run.series if not name.startswith("dct/"))


def _points(runs: Sequence[Run], name: str) -> int:
    return sum(len(run.series[name]) for run in runs if name in run.series)
