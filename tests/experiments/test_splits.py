"""What may stand between the language model's pieces, by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.scripts import train_on_ranks
from lightning_dct import SplitPoint
from nlp.model import TransformerLanguageModel
from nlp.splits import CODES, KINDS, RandomSplit, make_split

CONFIGURED: dict[str, Any] = {
    "density": 0.2,
    "forward_format": "int8",
    "backward_format": "int4",
    "refresh_every": 1000,
}


def test_kinds_by_name() -> None:
    """Oracle: the classes, and the settings that a kind settles."""
    made = {kind: make_split(16, 9, kind, **CONFIGURED) for kind in (*KINDS, *CODES)}
    points = {kind: parts[""] for kind, parts in made.items()}
    assert {kind for kind, point in points.items() if type(point) is not SplitPoint} == {"random"}
    assert {kind for kind, point in points.items() if point.width == 16} == set(CODES)
    assert {kind for kind, point in points.items() if point.density == 1.0} == {"quantised", *CODES}
    assert {kind for kind, point in points.items() if point.refresh_every == 1} == {"top_k"}
    assert all(
        (point.forward_format, point.backward_format) == ("int8", "int4")
        for point in points.values()
    )
    assert all(made[kind]["_encoder"].weight.shape == (4, 16) for kind in CODES)
    assert [made[kind]["_encoder"].weight.requires_grad for kind in CODES] == [False, False, True]
    assert made["subspace"]["_decoder"].anchor.weight.shape == (9, 16)
    with pytest.raises(
        ValueError, match=r"model\.split\.kind=svd: choose one of subspace, bottleneck, autoencoder"
    ):
        make_split(16, 9, "svd", **CONFIGURED)


def test_random_k_sends_as_many_entries_new_ones_each_step_and_the_same_back() -> None:
    """Oracle: counts; over many steps every entry comes equally often."""
    split = RandomSplit(0.2, forward_format="fp32", backward_format="fp32")
    values = torch.arange(1.0, 41.0).view(8, 5)
    hits = torch.zeros(8, 5)
    for step in range(400):
        split.advance(step)
        activations = values.clone().requires_grad_()
        received = split(activations)
        received.backward(values)
        mask = received.detach() != 0
        assert int(mask.sum()) == 8
        assert torch.equal(received, values * mask)
        assert torch.equal(activations.grad, values * mask)
        hits += mask
    assert bool(((hits / 400 - 0.2).abs() < 5 * (0.2 * 0.8 / 400) ** 0.5).all())


def test_a_code_stands_on_both_sides_of_a_border() -> None:
    model = TransformerLanguageModel(9, 8, width=16, pieces=3, split={"density": 0.25})
    names = [name for name, _ in model.named_children() if name.startswith("split")]
    assert names == [
        f"split_{cut}{part}" for cut in (0, 1) for part in ("_encoder", "", "_decoder")
    ]


@pytest.mark.parametrize("kind", ["threshold", "subspace"])
def test_whole_models_train_and_tell_what_would_cross(
    ranks: Any, tmp_path: Path, kind: str
) -> None:
    """Oracle: 4 bytes of each entry, batch x time x width, both ways, over the layout's sizes."""
    settings = ("model.split.pieces=3", f"model.split.kind={kind}", "model.width=16")
    small = (
        "data.batch_size=2",
        "data.context_length=8",
        "trainer.max_steps=3",
        "trainer.val_check_interval=3",
    )
    limits = ("+trainer.limit_val_batches=1", "test=false", "logger=none")
    train_on_ranks(ranks, tmp_path, "experiment=lm", *settings, *small, *limits)
    (file,) = tmp_path.glob("outputs/*/*/result.json")
    figures = json.loads(file.read_text())
    split = make_split(16, 9, kind, **CONFIGURED)[""]
    layout = split.layout((2, 8, 16 if kind == "threshold" else 4))
    # Two borders.
    words, left_over = layout.on_the_wire
    expected = 2 * (4 * words + left_over + 4 * words)
    assert figures["split_bytes_per_step"] == expected
    assert figures["split_ratio"] == pytest.approx(2 * 2 * 4 * 2 * 8 * 16 / expected)
