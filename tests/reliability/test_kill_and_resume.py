"""Training that is killed and resumed ends as if it had not been; at length: ``kill_and_resume.py
--kills 20``.
"""

from pathlib import Path

import pytest
import torch

from differences import differences
from reliability.kill_and_resume import survive
from reliability.killed_training import WORLD_SIZES


# Each kind takes six starts of a process or more; kill_and_resume.py has them all, and longer runs.
@pytest.mark.parametrize("kind", ["sharded", "tables", "growing", "pipeline", "fsdp"])
def test_killed_training_ends_as_if_undisturbed(tmp_path: Path, kind: str) -> None:
    """Oracle: the undisturbed run, every bit of what every rank holds at the end."""
    survival = survive(kind, 1, 1, tmp_path, batches=12)
    assert survival.kills == 1
    assert survival.unequal == []
    assert survival.difference == 0.0
    # A checkpoint is one file with one folder beside it, of its own save; nothing of killed saves
    # is left there.
    last = tmp_path / "disturbed-0" / "checkpoints" / "last.ckpt"
    assert last.exists()
    assert len(list(Path(f"{last}.dct").glob("*-rank-*"))) == WORLD_SIZES[kind]
    assert (
        len(
            {entry.name[: len("000000000024-5f0c93ab-")] for entry in Path(f"{last}.dct").iterdir()}
        )
        == 1
    )


def test_differences_are_found() -> None:
    """Oracle: by hand; otherwise the test above could not fail."""
    one = {"a": [torch.tensor([1.0, 2.0])], "b": 3}
    assert list(differences(one, one)) == []
    assert list(differences(one, {"a": [torch.tensor([1.0, 2.5])], "b": 3})) == [(".a[0]", 0.5)]
    assert list(differences(one, {"a": [torch.tensor([1.0, 2.0])], "b": 4})) == [
        (".b", float("inf"))
    ]
    assert list(differences(one, {"a": [torch.tensor([1.0, float("nan")])], "b": 3})) == [
        (".a[0]", float("inf"))
    ]
    assert list(differences(one, {"a": []})) == [("", float("inf"))]
