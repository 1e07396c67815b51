"""What may stand between the language model's pieces, by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from distributed.scripts import train_on_ranks
from lightning_dct import SplitPoint
from lightning_dct.activations import CodePoint
from nlp.comparators import RandomSplit
from nlp.model import TransformerLanguageModel
from nlp.splits import SETTLED, make_split

CONFIGURED: dict[str, Any] = {
    "density": 0.2,
    "select_by": "magnitude",
    "exploration": 0.0,
    "forward_format": "int8",
    "backward_format": "int4",
    "refresh_every": 1000,
    "warmup_steps": 0,
}


def test_kinds_by_name() -> None:
    """Oracle: the classes, and the settings that a kind settles."""
    codes = ("subspace", "bottleneck", "autoencoder")
    made = {kind: make_split(16, 9, kind, **CONFIGURED) for kind in SETTLED}
    assert {kind: type(parts[""]) for kind, parts in made.items()} == {
        **dict.fromkeys(SETTLED, SplitPoint),
        "random": RandomSplit,
        **dict.fromkeys(codes, CodePoint),
    }
    settings = {kind: parts[""].settings for kind, parts in made.items()}
    assert {kind: one.density for kind, one in settings.items()} == {
        **dict.fromkeys(SETTLED, 0.2),
        **dict.fromkeys(("quantised", *codes), 1.0),
    }
    assert (settings["top_k"].refresh_every, settings["top_k"].guard) == (1, False)
    assert all((one.forward_format, one.backward_format) == ("int8", "int4") for one in settings.values())
    assert all(made[kind]["_encoder"].weight.shape == (4, 16) for kind in codes)
    assert [made[kind]["_encoder"].weight.requires_grad for kind in codes] == [False, False, True]
    assert made["subspace"]["_decoder"].anchor.weight.shape == (9, 16)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("svd", {}, "model.split.kind=svd: choose one of subspace, bottleneck, threshold"),
        ("subspace", {"exploration": 0.1}, "model.split.exploration is about thresholds: leave it at 0.0"),
        ("autoencoder", {"warmup_steps": 500}, "model.split.warmup_steps is about thresholds: leave it at 0"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(kind: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_split(16, 9, kind, **{**CONFIGURED, **settings})


def test_a_code_stands_on_both_sides_of_a_border() -> None:
    model = TransformerLanguageModel(9, 8, width=16, pieces=3, split={"density": 0.25})
    names = [name for name, _ in model.named_children() if name.startswith("split")]
    assert names == [f"split_{cut}{part}" for cut in (0, 1) for part in ("_encoder", "", "_decoder")]


@pytest.mark.parametrize("kind", ["threshold", "subspace"])
def test_whole_models_train_and_tell_what_would_cross(ranks: Any, tmp_path: Path, kind: str) -> None:
    """Oracle: 4 bytes of each entry, batch x time x width, both ways, over the layout's sizes."""
    settings = ("model.split.pieces=3", f"model.split.kind={kind}", "model.split.warmup_steps=0", "model.width=16")
    small = ("data.batch_size=2", "data.context_length=8", "trainer.max_steps=3", "trainer.val_check_interval=3")
    limits = ("+trainer.limit_val_batches=1", "test=false", "logger=none")
    train_on_ranks(ranks, tmp_path, "experiment=lm", *settings, *small, *limits)
    (file,) = tmp_path.glob("outputs/*/*/result.json")
    figures = json.loads(file.read_text())
    split = make_split(16, 9, kind, **CONFIGURED)[""]
    layout = split.layout((2, 8, 16 if kind == "threshold" else 4))
    # Two borders.
    forward = layout.forward_positions_bytes + layout.forward_values_bytes
    expected = 2 * (forward + 4 * layout.wire_floats)
    assert figures["split_bytes_per_step"] == expected
    assert figures["split_ratio"] == pytest.approx(2 * 2 * 4 * 2 * 8 * 16 / expected)
