from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dct import checkpoint as saved
from strategies_for_hypothesis import examples


def state(residuals: dict[str, Tensor], **others: Any) -> dict[str, Any]:
    return {"synchronisations": 7, "thresholds": {"values": {}, "targets": {}}, "residuals": residuals, **others}


def test_names() -> None:
    note = saved.make_note(world_size=2, synchronisations=1200)
    assert saved.state_folder("runs/epoch=3.ckpt") == "runs/epoch=3.ckpt.dct"
    assert saved.state_path("epoch=3.ckpt", note, rank=1) == "epoch=3.ckpt.dct/000000001200-rank-1-of-2.pt"


def test_files_of_ranks_steps_and_worlds_differ() -> None:
    paths = {
        saved.state_path("a.ckpt", saved.make_note(world_size, step), rank)
        for world_size in (1, 2, 12)
        for step in (0, 1, 10)
        for rank in range(world_size)
    }
    assert len(paths) == (1 + 2 + 12) * 3


def test_note_holds_plain_numbers() -> None:
    note = saved.make_note(world_size=4, synchronisations=10)
    assert note == {"format_version": 1, "world_size": 4, "synchronisations": 10}
    saved.check_note(note, "a.ckpt")


@pytest.mark.parametrize("note", [{"format_version": 2, "world_size": 1}, {"format_version": "1"}, {}])
def test_notes_of_other_versions_are_refused(note: dict[str, Any]) -> None:
    found = repr(note.get("format_version"))
    with pytest.raises(ValueError, match=f"'a.ckpt' has format version {found};.*reads version 1"):
        saved.check_note(note, "a.ckpt")


def test_whose_files_a_rank_reads() -> None:
    assert saved.saved_ranks_for(rank=2, world_size=4, saved_world_size=4) == [2]
    assert saved.saved_ranks_for(rank=2, world_size=4, saved_world_size=3) == [0, 1, 2]
    assert saved.saved_ranks_for(rank=0, world_size=1, saved_world_size=2) == [0, 1]
    assert saved.saved_ranks_for(rank=3, world_size=4, saved_world_size=1) == [0]


def test_own_state_is_taken_as_it_is() -> None:
    mine = state({"a": torch.tensor([0.1, 0.2])}, steps_since_refresh=3)
    merged = saved.merge_states([mine])
    assert merged == mine
    assert merged["residuals"]["a"] is mine["residuals"]["a"]


# Their sums are exact in fp64, whatever the order, and not in fp32.
numbers = st.integers(-(2**24), 2**24).map(lambda number: number * 2.0**-12)


@given(rows=st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=2, max_size=5))
@examples(200)
def test_merging_takes_the_mean_in_fp64(rows: list[list[float]]) -> None:
    merged = saved.merge_states([state({"a": torch.tensor(row)}) for row in rows])["residuals"]["a"]
    expected = [sum(column[1:], start=column[0]) / len(rows) for column in zip(*rows, strict=True)]
    assert merged.dtype == torch.float32
    np.testing.assert_array_equal(merged.numpy(), np.array(expected).astype(np.float32))


def test_the_mean_would_be_lost_in_fp32() -> None:
    states = [state({"a": torch.tensor([value])}) for value in (1e8, 1.0, -1e8, 1.0)]
    assert saved.merge_states(states)["residuals"]["a"].item() == 0.5


def test_a_rank_without_a_residual_held_nothing_back() -> None:
    states = [state({"a": torch.tensor([4.0])}), state({"b": torch.tensor([2.0])}), state({}), state({})]
    assert saved.merge_states(states)["residuals"] == {"a": torch.tensor([1.0]), "b": torch.tensor([0.5])}


def test_merging_keeps_dtypes_the_rest_of_the_state_and_its_arguments() -> None:
    states = [state({"a": torch.tensor([x], dtype=torch.float64)}, steps_since_refresh=5) for x in (1.0, 2.0)]
    merged = saved.merge_states(states)
    assert merged["residuals"]["a"].dtype == torch.float64
    assert merged["synchronisations"] == 7
    assert merged["steps_since_refresh"] == 5
    assert states[0]["residuals"]["a"].item() == 1.0
