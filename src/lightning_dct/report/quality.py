"""Which logged metric tells the quality of a run, and which way is better, judged by its name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from lightning_dct.report.run import Run

HIGHER_IS_BETTER = (
    "auc", "auroc", "accuracy", "acc", "f1", "bleu", "chrf", "rouge", "precision", "recall", "map", "ndcg", "dice",
    "iou",
)  # fmt: skip
"""Words in the names of metrics of which more is better, the preferred ones first."""

LOWER_IS_BETTER = ("loss", "perplexity", "ppl", "error", "nll", "mse", "rmse", "mae", "wer", "cer", "bits")
"""Words in the names of metrics of which less is better, the preferred ones first."""

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
    """Whether more of a metric is better; None if its name does not tell."""
    words = words_of(name)
    if any(word in LOWER_IS_BETTER for word in words):
        return False
    return True if any(word in HIGHER_IS_BETTER for word in words) else None


def stage_of(name: str) -> str:
    """The part of the data a metric was measured on: ``train``, ``val``, ``test``, or empty."""
    for word in words_of(name):
        if word in _VALIDATION:
            return "val"
        if word in _TRAINING:
            return "train"
        if word == "test":
            return "test"
    return ""


def find_quality(runs: Sequence[Run]) -> str | None:
    """The metric of validation, else of test, that most runs have, in the order of the words above."""
    names = [n for n in logged_names(runs) if stage_of(n) in ("val", "test") and "best" not in words_of(n)]
    return _most_logged(runs, names, "val", (*HIGHER_IS_BETTER, *LOWER_IS_BETTER))


def find_training_loss(runs: Sequence[Run]) -> str | None:
    """The training loss that most runs have, and of which most values were logged; None without any."""
    names = [name for name in logged_names(runs) if "loss" in words_of(name) and stage_of(name) in ("train", "")]
    return _most_logged(runs, names, "train", ())


def _most_logged(runs: Sequence[Run], names: Sequence[str], stage: str, preferred: Sequence[str]) -> str | None:
    counts = logged_names(runs)

    def rank(name: str) -> tuple[int, bool, int, int, str]:
        known = [preferred.index(word) for word in words_of(name) if word in preferred]
        points = sum(len(run.series[name]) for run in runs if name in run.series)
        return -counts[name], stage_of(name) != stage, min(known, default=len(preferred)), -points, name

    return min(names, key=rank, default=None)


def same_on_test(name: str, runs: Sequence[Run]) -> str | None:
    """The test metric of the same name, ``test/loss`` for ``val/loss``; None without any."""
    rest = [word for word in words_of(name) if word not in _VALIDATION]
    if stage_of(name) != "val":
        return None
    found = [other for other in logged_names(runs) if words_of(other) == ["test", *rest]]
    return found[0] if found else None


def logged_names(runs: Sequence[Run]) -> Counter[str]:
    """How many runs have logged each name, except those of the compression."""
    return Counter(name for run in runs for name in run.series if not name.startswith("dct/"))
