import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor

from lightning_dct import CheckpointError, DCTStrategy, agreement
from lightning_dct.checkpoint import format as saved
from lightning_dct.checkpoint.format import check_state
from lightning_dct.checkpoint.reading import (
    agreed_manifests,
    compared,
    merge_states,
    read_state,
    with_edited_groups,
)
from lightning_dct.embedding.table_files import RowFiles, write_rows
from strategies_for_hypothesis import examples

MANIFEST = saved.make_manifest(world_size=2, synchronisations=7, save="5f0c93ab")


def state(residuals: dict[str, Tensor], **others: Any) -> dict[str, Any]:
    counted = {"synchronisations": 7, "steps_since_refresh": 3, "traffic": {}, "owned": {}}
    return {
        **counted,
        "thresholds": {"values": {}, "targets": {}},
        "residuals": residuals,
        **others,
    }


def test_names() -> None:
    manifest = saved.make_manifest(world_size=2, synchronisations=1200, save="5f0c93ab")
    assert saved.state_folder("runs/epoch=3.ckpt") == "runs/epoch=3.ckpt.dct"
    assert (
        saved.state_path("epoch=3.ckpt", manifest, rank=1)
        == "epoch=3.ckpt.dct/000000001200-5f0c93ab-rank-1-of-2.pt"
    )
    assert (
        saved.rows_path("epoch=3.ckpt", manifest) == "epoch=3.ckpt.dct/000000001200-5f0c93ab-rows"
    )


def test_no_killed_save_looks_like_a_checkpoint_of_a_requeued_job(tmp_path: Path) -> None:
    """Lightning resumes from the largest N of all names with ``hpc_ckpt_N``, whatever they are.

    Oracle: the folder's name, and the state that is read from it.
    """
    path = str(tmp_path / "hpc_ckpt_3.ckpt")
    saved.write_state(TorchCheckpointIO(), path, MANIFEST, 0, state({"a": LONE}))
    assert [entry.name for entry in tmp_path.iterdir()] == ["hpc-ckpt-3.ckpt.dct"]
    saved.remove_outdated(TorchCheckpointIO(), path, [])
    assert read_state(TorchCheckpointIO(), path, MANIFEST, 0, 2)["residuals"] == {"a": LONE}


@pytest.mark.parametrize(
    "manifest", [{**MANIFEST, "format_version": 2}, {"format_version": "4"}, {}]
)
def test_manifests_of_other_versions_are_refused(manifest: dict[str, Any]) -> None:
    found = repr(manifest.get("format_version"))
    with pytest.raises(
        CheckpointError, match=rf"'a.ckpt' has format version {found};.*\s+reads version 4"
    ):
        agreed_manifests([manifest], "a.ckpt")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("world_size", 0),
        ("world_size", "2"),
        ("world_size", None),
        ("synchronisations", -1),
        ("synchronisations", 1e30),
        ("synchronisations", 10**30),
        ("save", "../../x"),
        ("save", "x/y"),
        ("save", ""),
        ("save", None),
        ("save", 7),
        ("stages", 0),
        ("stages", 3),
        ("has_state", "yes"),
        ("has_rows", torch.zeros(2)),
    ],
)
def test_notes_that_cannot_be_are_refused(field: str, value: Any) -> None:
    """Oracle: an error that names the file and the field, before anything becomes a path or a
    divisor.
    """
    with pytest.raises(CheckpointError, match=rf"'a.ckpt' .* lightning_dct\['{field}'\]"):
        agreed_manifests([{**MANIFEST, field: value}], "a.ckpt")


@pytest.mark.parametrize(
    "manifests",
    [
        [],
        [MANIFEST],
        [{**MANIFEST, "another": 1}, MANIFEST],
        [saved.make_manifest(4, 0, "a", stages=2)],
    ],
)
def test_manifests_that_can_be_are_taken(manifests: list[Any]) -> None:
    assert agreed_manifests(manifests, "a.ckpt") == manifests


@pytest.mark.parametrize("manifests", [MANIFEST, None, [[MANIFEST]], ["text"]])
def test_what_is_no_manifest_is_refused(manifests: Any) -> None:
    with pytest.raises(CheckpointError, match="lightning_dct"):
        agreed_manifests(manifests, "a.ckpt")


def test_a_checkpoint_loads_where_the_module_has_no_trainer(tmp_path: Path) -> None:
    """Oracle: what was saved; so it is in the process that has started others, once ``dct_spawn``
    is done.
    """
    strategy = DCTStrategy()
    strategy._lightning_module = BoringModel()
    torch.save({"lightning_dct": MANIFEST}, tmp_path / "a.ckpt")
    assert strategy.load_checkpoint(tmp_path / "a.ckpt") == {"lightning_dct": MANIFEST}


@pytest.mark.parametrize(
    ("manifest", "rank", "field"),
    [
        (MANIFEST, 1, "rank"),
        (saved.make_manifest(3, 7, "5f0c93ab"), 0, "world_size"),
        (saved.make_manifest(2, 7, "5f0c93ac"), 0, "save"),
        (saved.make_manifest(2, 6, "5f0c93ab"), 0, "synchronisations"),
    ],
)
def test_another_file_under_a_ranks_name_is_refused(
    path: str, manifest: dict[str, Any], rank: int, field: str
) -> None:
    """Oracle: a file that was written for another rank, world, save or step, of the same shape, put
    in the place.
    """
    name = saved.state_path(path, MANIFEST, 0)
    older = {**state({"a": torch.ones(1)}), "synchronisations": manifest["synchronisations"]}
    saved.write_state(TorchCheckpointIO(), path, manifest, rank, older)
    Path(saved.state_path(path, manifest, rank)).rename(name)
    for world_size in (2, 3):
        with pytest.raises(CheckpointError) as caught:
            read_state(TorchCheckpointIO(), path, MANIFEST, 0, world_size)
        assert repr(name) in str(caught.value)
        assert f"its field {field!r}" in str(caught.value)


LONE = torch.tensor([1.0])


@pytest.mark.parametrize(
    ("field", "parts"),
    [
        (
            r"residuals\['a'\] is not a list of finite numbers",
            {"residuals": {"a": torch.tensor([1.0, math.nan])}},
        ),
        (r"residuals\['a'\]", {"residuals": {"a": torch.tensor([math.inf])}}),
        (r"owned\['a'\]\[0\]", {"owned": {"a": {0: torch.tensor([math.nan])}}}),
        (r"owned\['a'\] has the key -1", {"owned": {"a": {-1: LONE}}}),
        (r"synchronisations is not a count", {"synchronisations": 10**30}),
        (r"synchronisations", {"synchronisations": 1e30}),
        (r"steps_since_refresh", {"steps_since_refresh": -1}),
        (r"traffic\['steps'\]", {"traffic": {"steps": math.nan}}),
        (r"traffic\['bytes_sent'\]", {"traffic": {"bytes_sent": -1}}),
        (r"traffic has the key 'bites'", {"traffic": {"bites": 1}}),
        *(
            (
                r"thresholds\['values'\]\['a'\]",
                {"thresholds": {"values": {"a": value}, "targets": {"a": 1}}},
            )
            for value in (math.nan, math.inf, 0.0, -1.0, 10**400, "1")
        ),
        (
            r"thresholds has values without targets",
            {"thresholds": {"values": {"a": 1.0}, "targets": {}}},
        ),
        (r"weights\['a'\]", {"weights": {"a": torch.zeros(2).to_sparse()}}),
        (r"optimizers is not a list", {"optimizers": {}}),
        (r"exchange_clocks\['a'\]", {"exchange_clocks": {"a": -1}}),
        (r"in_flight\['a'\]", {"in_flight": {"a": 1}}),
    ],
)
def test_states_that_cannot_be_are_refused(field: str, parts: dict[str, Any]) -> None:
    """Oracle: an error that names the field; read from a file, it names that too (see the fuzz
    tests).
    """
    with pytest.raises(CheckpointError, match=field):
        check_state(state({}) | parts)


def own_weights(value: float) -> dict[str, Any]:
    """What ranks that train between exchanges save besides; a user's model may hold NaN."""
    return {
        "weights": {
            "a": torch.tensor([[value, math.nan]]),
            "b": torch.tensor(value + 1j),
            "c": torch.zeros(0, 2),
            "seen": torch.tensor(int(value)),
        },
        "optimizers": [
            {
                "state": {0: {"step": torch.tensor(3.0), "mean": torch.tensor([math.nan])}},
                "param_groups": [{"lr": 0.1}],
            },
            {
                "state": {},
                "param_groups": [
                    {"betas": (0.9, 0.99), "foreach": None, "name": "x", "amsgrad": False}
                ],
            },
        ],
        "exchange_clocks": {"a": int(abs(value))},
        "in_flight": {"a": torch.tensor([value])},
        "of a later version": {1: {2}},
    }


def test_own_weights_of_another_world_are_the_mean() -> None:
    """Oracle: the fp64 mean of weights in their dtypes; of what is on its way and when, what the
    first rank says.
    """
    states = [state({}, **own_weights(value)) for value in (1e8, 1.0, -1e8, 1.0)]
    for one in states:
        check_state(one)
    merged = merge_states(states)
    assert merged["weights"]["a"].dtype == torch.float32
    assert merged["weights"]["a"].nan_to_num(7.0).tolist() == [[0.5, 7.0]]
    assert merged["weights"]["b"].dtype == torch.complex64
    assert merged["weights"]["b"].item() == 0.5 + 1j
    assert merged["weights"]["seen"].tolist() == 10**8
    assert merged["weights"]["c"].shape == (0, 2)
    assert merged["exchange_clocks"] is states[0]["exchange_clocks"]
    assert merge_states(states[:1]) == {**states[0], "modules": {}}
    assert "weights" not in merge_states([state({}), state({})])


@pytest.mark.parametrize(
    ("world_size", "stages", "holds_shards", "whole"),
    [
        (2, 2, True, False),
        (2, 1, True, True),
        (4, 2, True, True),
        (2, 2, False, True),
        (1, 1, False, True),
    ],
)
def test_shards_of_one_replica_are_whole_for_another_layout(
    tmp_path: Path, world_size: int, stages: int, holds_shards: bool, whole: bool
) -> None:
    """Oracle: the rows of both ranks, no rank's moments, which belong to its rows only, and no
    updates on their way.
    """
    path = str(tmp_path / "a.ckpt")
    manifest = saved.make_manifest(2, 7, "5f0c93ab", stages=2)
    for rank in range(2):
        rows = {"weights": {"a": torch.full((2, 3), float(rank))}, "shards": {"a": [2, 3]}}
        alone = {
            "optimizers": [{"state": {}, "param_groups": []}],
            "scaler": {"scale": 2.0},
            "in_flight": {},
        }
        own = state({"a": torch.full((6,), 1.0 + rank)}, **rows, **alone)
        saved.write_state(TorchCheckpointIO(), path, manifest, rank, own)
    read = read_state(TorchCheckpointIO(), path, manifest, 1, world_size, stages, holds_shards)
    assert read["weights"]["a"].tolist() == ([[0.0] * 3] * 2 if whole else []) + [[1.0] * 3] * 2
    assert read["residuals"]["a"].tolist() == ([1.0] * 6 if whole else []) + [2.0] * 6
    assert {"optimizers", "scaler", "in_flight", "shards"}.isdisjoint(read) == whole


@pytest.mark.parametrize(
    "theirs", [[], [{"param_groups": []}], [{"param_groups": [{"lr": 1.0}]}] * 2]
)
def test_optimizers_that_a_hook_has_changed_are_taken_from_the_checkpoint(
    theirs: list[dict[str, Any]],
) -> None:
    """As where ``on_load_checkpoint`` clears them, to go on with a new optimizer."""
    own = [{"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}]
    with pytest.warns(UserWarning, match="optimizers are missing or were changed"):
        assert with_edited_groups(own, theirs, 7) == theirs
    # An optimizer of the user's own.
    assert with_edited_groups([{"state": {}}], [{}], None) == [{"state": {}}]


def test_a_folder_of_shards_is_refused_by_others(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"folder of shards.*`DCTFSDPStrategy\(save_distributed_checkpoint=False\)`",
    ):
        DCTStrategy().load_checkpoint(tmp_path)


def test_a_folder_that_another_node_removes_meanwhile_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a.ckpt.dct"
    folder.mkdir()
    seen = LocalFileSystem.isdir

    def remove_afterwards(self: Any, path: str) -> bool:
        found = seen(self, path)
        folder.rmdir()
        return found

    monkeypatch.setattr(LocalFileSystem, "isdir", remove_afterwards)
    assert saved.files_beside(str(tmp_path / "a.ckpt")) == []


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("residuals", {"a": torch.ones(2)}),
        ("weights", {"a": torch.ones(1, 3)}),
        ("accumulated", {"a": torch.ones(3)}),
    ],
)
def test_ranks_files_that_do_not_fit_each_other_are_refused(
    tmp_path: Path, field: str, other: dict[str, Any]
) -> None:
    """Oracle: an error that names the folder and the tensor, where broadcasting would have made
    something of them.
    """
    path = str(tmp_path / "a.ckpt")
    own = {"residuals": {"a": LONE}, "weights": {"a": torch.ones(3, 1)}, "accumulated": {"a": LONE}}
    for rank, parts in enumerate((own, {**own, field: other})):
        saved.write_state(TorchCheckpointIO(), path, MANIFEST, rank, state({}) | parts)
    with pytest.raises(
        CheckpointError, match=rf"{path}.dct.* do not fit each other .*{field}\['a'\]"
    ):
        read_state(TorchCheckpointIO(), path, MANIFEST, 0, 3)


def test_tidying_finds_a_folder_that_is_listed_with_a_slash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: what is left in a store that lists folders, and itself among them, as some do."""
    path = "memory://tidied/a.ckpt"
    files = MemoryFileSystem()
    old, rows = (
        f"{saved.state_folder(path)}/000000000006-5f0c93ab-{name}"
        for name in ("rank-0-of-1.pt", "rows")
    )
    files.pipe({old: b"old", f"{rows}/rank-0.rows": b"rows"})
    names = [
        *(f"{name}/" for name in files.ls("/tidied/a.ckpt.dct", detail=False)),
        "/tidied/a.ckpt.dct/",
    ]
    monkeypatch.setattr(MemoryFileSystem, "ls", lambda *_, **__: names)
    assert saved.files_beside(path) == [old, rows]


def test_tidying_leaves_what_came_later(path: str) -> None:
    """Oracle: files of other saves, killed ones among them, are gone; those of this one and of
    later ones are there.
    """
    (own,) = {Path(saved.state_path(path, MANIFEST, rank)).parent for rank in (0, 1)}
    kept = sorted(str(file) for file in own.iterdir())
    own.rename(own.with_name("aside"))
    others = [
        saved.make_manifest(2, 7, "00000000"),
        saved.make_manifest(2, 9, "5f0c93ab"),
        saved.make_manifest(3, 6, "5f0c93ac"),
    ]
    for manifest in others:
        saved.write_state(TorchCheckpointIO(), path, manifest, 0, state({}))
    (Path(saved.rows_path(path, others[0])) / "deeper").mkdir(parents=True)
    outdated = saved.files_beside(path)
    for file in own.with_name("aside").iterdir():
        file.rename(own / file.name)
    saved.remove_outdated(TorchCheckpointIO(), path, outdated)
    assert saved.files_beside(path) == kept
    saved.remove_outdated(TorchCheckpointIO(), path, kept)
    assert not own.exists()


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A checkpoint of two ranks whose residuals are 1 and 4."""
    checkpoint = str(tmp_path / "a.ckpt")
    for rank, value in enumerate((1.0, 4.0)):
        saved.write_state(
            TorchCheckpointIO(), checkpoint, MANIFEST, rank, state({"a": torch.tensor([value])})
        )
    return checkpoint


@pytest.mark.parametrize(
    ("rank", "world_size", "residual"),
    [(0, 2, 1.0), (1, 2, 4.0), (0, 1, 2.5), (0, 3, 2.5), (2, 3, 2.5)],
)
def test_a_rank_reads_its_own_state_or_the_mean(
    path: str, rank: int, world_size: int, residual: float
) -> None:
    read = read_state(TorchCheckpointIO(), path, MANIFEST, rank, world_size)
    assert read["residuals"]["a"].item() == residual
    assert read["synchronisations"] == 7


@pytest.mark.parametrize("missing", [0, 1])
def test_missing_files_are_named(path: str, missing: int) -> None:
    file = Path(saved.state_path(path, MANIFEST, missing))
    file.unlink()
    with pytest.raises(FileNotFoundError) as raised:
        read_state(TorchCheckpointIO(), path, MANIFEST, missing, 2)
    assert repr(str(file)) in str(raised.value)
    assert f"{path}.dct" in str(raised.value)
    read_state(TorchCheckpointIO(), path, MANIFEST, 1 - missing, 2)  # the other rank has its own
    with pytest.raises(FileNotFoundError):
        read_state(TorchCheckpointIO(), path, MANIFEST, 0, 3)


class Elsewhere(TorchCheckpointIO):
    """Keeps all files in a store of its own."""

    def __init__(self, store: Path) -> None:
        self.store = store

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        super().save_checkpoint(checkpoint, f"{self.store}/{path}", storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super().load_checkpoint(f"{self.store}/{path}", *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        super().remove_checkpoint(f"{self.store}/{path}")


def test_files_that_lie_elsewhere_are_kept_and_read(tmp_path: Path) -> None:
    """Oracle: what was written with the user's ``CheckpointIO``, after the save has tidied up."""
    io = Elsewhere(tmp_path)
    path = "folder/a.ckpt"
    fingerprints = [saved.write_state(io, path, MANIFEST, 0, state({"a": LONE}))]
    io.save_checkpoint({"a": MANIFEST}, path)
    saved.remove_outdated(io, path, saved.files_beside(path))
    with compared(path) as found:
        assert io.load_checkpoint(path) == {"a": MANIFEST}
    assert (fingerprints, found) == ([""], [None])
    assert read_state(io, path, MANIFEST, 0, 2)["residuals"] == {"a": LONE}
    with pytest.raises(FileNotFoundError), compared("folder/b.ckpt"):
        io.load_checkpoint("folder/b.ckpt")


def test_a_rank_without_the_checkpoint_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it was not copied to each machine; another rank has it."""
    there = ("5f0c93ab", path), None, "None", None
    monkeypatch.setattr(agreement, "gather_objects", lambda mine: [there, mine])
    with (
        pytest.raises(FileNotFoundError, match=rf"'{path}' is not there on ranks \[1\]"),
        compared(path),
    ):
        pass


# Their sums are exact in fp64, whatever the order, and not in fp32.
numbers = st.integers(-(2**24), 2**24).map(lambda number: number * 2.0**-12)


@given(rows=st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=2, max_size=5))
@examples(60)
def test_merging_takes_the_mean_in_fp64(rows: list[list[float]]) -> None:
    merged = merge_states([state({"a": torch.tensor(row)}) for row in rows])["residuals"]["a"]
    expected = [sum(column[1:], start=column[0]) / len(rows) for column in zip(*rows, strict=True)]
    assert merged.dtype == torch.float32
    np.testing.assert_array_equal(merged.numpy(), np.array(expected).astype(np.float32))


def test_a_rank_without_a_residual_held_nothing_back() -> None:
    states = [
        state({"a": torch.tensor([4.0])}),
        state({"b": torch.tensor([2.0])}),
        state({}),
        state({}),
    ]
    assert merge_states(states)["residuals"] == {"a": torch.tensor([1.0]), "b": torch.tensor([0.5])}


def test_accumulated_gradients_of_another_world_are_the_mean() -> None:
    """Oracle: the fp64 mean in the gradients' shape and dtype; a rank without one adds nothing,
    sparse ones go.
    """
    sparse = torch.ones(3).to_sparse()
    states = [
        state({}, accumulated={"a": torch.tensor([[1.0, 1e8]]), "rows": sparse}),
        state({}, accumulated={"a": torch.tensor([[4.0, 1.0]])}),
        state({}, accumulated={"a": torch.tensor([[1.0, -1e8]])}),
        state({}),
    ]
    merged = merge_states(states)["accumulated"]
    assert list(merged) == ["a"]
    assert merged["a"].dtype == torch.float32
    assert merged["a"].tolist() == [[1.5, 0.25]]
    two_replicas_of_two_stages = merge_states(
        [
            state({}, accumulated={name: torch.tensor([value])})
            for value in (1.0, 2.0)
            for name in "ab"
        ],
        stages=2,
    )
    assert two_replicas_of_two_stages["accumulated"] == {
        "a": torch.tensor([1.5]),
        "b": torch.tensor([1.5]),
    }


def test_empty_tensors_of_rows_keep_their_kind(tmp_path: Path) -> None:
    """Those that were arrays of numpy have a stride of 0."""
    folder = str(tmp_path / "rows")
    keys = torch.from_numpy(np.empty(0, dtype=np.int64))
    write_rows(
        folder, [("keys", 0, 0, keys), ("state", 0, 0, torch.empty(0, 4, dtype=torch.float64))]
    )
    files = RowFiles(folder)
    assert [
        (files.index[name]["dtype"], files.index[name]["shape"]) for name in ("keys", "state")
    ] == [
        ("int64", [0]),
        ("float64", [0, 4]),
    ]
    assert files.num_rows("state") == 0
