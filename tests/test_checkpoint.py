from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor

from lightning_dct import checkpoint as saved
from strategies_for_hypothesis import examples

NOTE = saved.make_note(world_size=2, synchronisations=7, save="5f0c93ab")


def state(residuals: dict[str, Tensor], **others: Any) -> dict[str, Any]:
    counted = {"synchronisations": 7, "steps_since_refresh": 3, "traffic": {}}
    return {**counted, "thresholds": {"values": {}, "targets": {}}, "residuals": residuals, **others}


def test_names() -> None:
    note = saved.make_note(world_size=2, synchronisations=1200, save="5f0c93ab")
    assert saved.state_folder("runs/epoch=3.ckpt") == "runs/epoch=3.ckpt.dct"
    assert saved.state_path("epoch=3.ckpt", note, rank=1) == "epoch=3.ckpt.dct/000000001200-5f0c93ab-rank-1-of-2.pt"
    assert saved.rows_path("epoch=3.ckpt", note) == "epoch=3.ckpt.dct/000000001200-5f0c93ab-rows"


def test_names_of_version_1() -> None:
    note = {"format_version": 1, "world_size": 2, "synchronisations": 1200, "has_state": 1, "has_rows": 0}
    assert saved.state_path("epoch=3.ckpt", note, rank=1) == "epoch=3.ckpt.dct/000000001200-rank-1-of-2.pt"
    assert saved.rows_path("epoch=3.ckpt", note) == "epoch=3.ckpt.dct/000000001200-rows"


def test_files_of_ranks_steps_worlds_and_saves_differ() -> None:
    paths = {
        saved.state_path("a.ckpt", saved.make_note(world_size, step, save), rank)
        for world_size in (1, 2, 12)
        for step in (0, 1, 10)
        for save in ("a", "b")
        for rank in range(world_size)
    }
    assert len(paths) == (1 + 2 + 12) * 3 * 2


def test_no_folder_looks_like_a_checkpoint_of_a_requeued_job() -> None:
    """Lightning resumes from the largest N of all names with ``hpc_ckpt_N``, whatever they are."""
    assert saved.state_folder("runs/hpc_ckpt_3.ckpt") == "runs/hpc-ckpt-3.ckpt.dct"


def test_note_holds_plain_values() -> None:
    note = saved.make_note(world_size=4, synchronisations=10, save="5f0c93ab")
    assert note == {
        "format_version": 2,
        "world_size": 4,
        "synchronisations": 10,
        "save": "5f0c93ab",
        "has_state": 1,
        "has_rows": 0,
    }


@pytest.mark.parametrize("note", [{"format_version": 3, "world_size": 1}, {"format_version": "1"}, {}])
def test_notes_of_other_versions_are_refused(note: dict[str, Any]) -> None:
    found = repr(note.get("format_version"))
    with pytest.raises(ValueError, match=rf"'a.ckpt' has format version {found};.*\s+reads versions 1 and 2"):
        saved.read_state(TorchCheckpointIO(), "a.ckpt", note, 0, 1)


def test_state_of_version_1_is_read(tmp_path: Path) -> None:
    """Oracle: the name that version 1 gave its files, and what they hold."""
    note = {"format_version": 1, "world_size": 1, "synchronisations": 7, "has_state": 1, "has_rows": 0}
    file = tmp_path / "a.ckpt.dct" / "000000000007-rank-0-of-1.pt"
    file.parent.mkdir()
    torch.save(state({"a": torch.tensor([3.0])}), file)
    read = saved.read_state(TorchCheckpointIO(), str(tmp_path / "a.ckpt"), note, 0, 1)
    assert read["residuals"]["a"].item() == 3.0


def test_tidying_leaves_what_the_checkpoint_points_at(path: str) -> None:
    """Oracle: files of other saves, killed ones among them, are gone; those of this one are there."""
    others = [saved.make_note(2, 7, "00000000"), saved.make_note(2, 9, "5f0c93ab"), saved.make_note(3, 6, "5f0c93ac")]
    for note in others:
        saved.write_state(TorchCheckpointIO(), path, note, 0, state({}))
    (Path(saved.rows_path(path, others[0])) / "deeper").mkdir(parents=True)
    saved.remove_outdated(TorchCheckpointIO(), path, NOTE)
    assert sorted(str(file) for file in Path(f"{path}.dct").iterdir()) == [
        saved.state_path(path, NOTE, rank) for rank in (0, 1)
    ]
    saved.remove_outdated(TorchCheckpointIO(), path, None)
    assert not Path(f"{path}.dct").exists()
    saved.remove_outdated(TorchCheckpointIO(), path, NOTE)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A checkpoint of two ranks whose residuals are 1 and 4."""
    checkpoint = str(tmp_path / "a.ckpt")
    for rank, value in enumerate((1.0, 4.0)):
        saved.write_state(TorchCheckpointIO(), checkpoint, NOTE, rank, state({"a": torch.tensor([value])}))
    return checkpoint


def test_files_are_where_their_names_say(path: str) -> None:
    assert sorted(str(file) for file in Path(f"{path}.dct").iterdir()) == [
        saved.state_path(path, NOTE, rank) for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("rank", "world_size", "residual"), [(0, 2, 1.0), (1, 2, 4.0), (0, 1, 2.5), (0, 3, 2.5), (2, 3, 2.5)]
)
def test_a_rank_reads_its_own_state_or_the_mean(path: str, rank: int, world_size: int, residual: float) -> None:
    read = saved.read_state(TorchCheckpointIO(), path, NOTE, rank, world_size)
    assert read["residuals"]["a"].item() == residual
    assert read["synchronisations"] == 7


@pytest.mark.parametrize("missing", [0, 1])
def test_missing_files_are_named(path: str, missing: int) -> None:
    file = Path(saved.state_path(path, NOTE, missing))
    file.unlink()
    with pytest.raises(FileNotFoundError) as raised:
        saved.read_state(TorchCheckpointIO(), path, NOTE, missing, 2)
    assert repr(str(file)) in str(raised.value)
    assert f"{path}.dct" in str(raised.value)
    saved.read_state(TorchCheckpointIO(), path, NOTE, 1 - missing, 2)  # the other rank has its own
    with pytest.raises(FileNotFoundError):
        saved.read_state(TorchCheckpointIO(), path, NOTE, 0, 3)


def test_own_state_is_taken_as_it_is() -> None:
    mine = state({"a": torch.tensor([0.1, 0.2])}, steps_since_refresh=3)
    merged = saved.merge_states([mine])
    assert merged == {**mine, "modules": {}}
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


def test_accumulated_gradients_of_another_world_are_the_mean() -> None:
    """Oracle: the fp64 mean in the gradients' shape and dtype; a rank without one adds nothing, sparse ones go."""
    sparse = torch.ones(3).to_sparse()
    states = [
        state({}, accumulated={"a": torch.tensor([[1.0, 1e8]]), "rows": sparse}),
        state({}, accumulated={"a": torch.tensor([[4.0, 1.0]])}),
        state({}, accumulated={"a": torch.tensor([[1.0, -1e8]])}),
        state({}),
    ]
    merged = saved.merge_states(states)["accumulated"]
    assert list(merged) == ["a"]
    assert merged["a"].dtype == torch.float32
    assert merged["a"].tolist() == [[1.5, 0.25]]
    two_replicas_of_two_stages = saved.merge_states(
        [state({}, accumulated={name: torch.tensor([value])}) for value in (1.0, 2.0) for name in "ab"], stages=2
    )
    assert two_replicas_of_two_stages["accumulated"] == {"a": torch.tensor([1.5]), "b": torch.tensor([1.5])}
