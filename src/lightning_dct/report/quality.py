"""Finds the logged metric of quality by its name, and whether higher is better."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

HIGHER_IS_BETTER = (
    "auc", "auroc", "accuracy", "acc", "f1", "bleu", "chrf", "rouge", "precision", "recall", "map", "ndcg", "dice",
    "iou",
)  # fmt: skip
"""Words in the names of metrics for which higher is better, the preferred ones first."""

LOWER_IS_BETTER = ("loss", "perplexity", "ppl", "error", "nll", "mse", "rmse", "mae", "wer", "cer", "bits")
"""Words in the names of metrics for which lower is better, the preferred ones first."""

_STAGES = {"val": "val", "valid": "val", "validation": "val", "eval": "val", "dev": "val", "test": "test"}
_PREFERRED = (*HIGHER_IS_BETTER, *LOWER_IS_BETTER)


def words_of(name: str) -> list[str]:
    """The words of a metric's name.

    Example:
        >>> words_of("val/bits_per_byte")
        ['val', 'bits', 'per', 'byte']
    """
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]


def higher_is_better(name: str) -> bool | None:
    """Whether higher values of a metric are better; None if its name has no known word."""
    words = words_of(name)
    if any(word in LOWER_IS_BETTER for word in words):
        return False
    return True if any(word in HIGHER_IS_BETTER for word in words) else None


def stage_of(name: str) -> str:
    """The part of the data that a metric was measured on: ``val``, ``test``, or ``train``."""
    return next((_STAGES[word] for word in words_of(name) if word in _STAGES), "train")


def find_quality(runs: Iterable[Mapping[str, object]]) -> str | None:
    """The metric of validation, else of test, that most of the runs have logged, in the order of the words above."""

    def rank(name: str) -> tuple[int, bool, int, str]:
        known = [_PREFERRED.index(word) for word in words_of(name) if word in _PREFERRED]
        return -counts[name], stage_of(name) != "val", min(known, default=len(_PREFERRED)), name

    counts = logged_names(runs)
    return min((n for n in counts if stage_of(n) != "train" and "best" not in words_of(n)), key=rank, default=None)


def find_training_loss(runs: Iterable[Mapping[str, object]]) -> str | None:
    """The training loss that most runs have; None without any."""
    counts = logged_names(runs)
    names = [name for name in counts if "loss" in words_of(name) and stage_of(name) == "train"]
    return min(names, key=lambda name: (-counts[name], "epoch" in words_of(name), name), default=None)


def logged_names(runs: Iterable[Mapping[str, object]]) -> Counter[str]:
    """How many runs have logged each name, except those of the compression."""
    return Counter(name for run in runs for name in run if not name.startswith("dct/"))
