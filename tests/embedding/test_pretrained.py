"""Rows that are loaded before fit, on one and on several ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from embedding.hybrid import Hybrid, fit, together, whole
from lightning_dct import ShardedEmbeddingBags
from lightning_dct.embedding.table_files import saved_in_shards


def pretrained(module: Hybrid) -> Tensor:
    numbers = torch.Generator().manual_seed(4)
    return torch.randn(
        sum(module.tables.table_rows), module.tables.embedding_dim, generator=numbers
    )


def start(way: str, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The rows at the start of fit, and after some steps."""
    module = Hybrid({"density": 1.0, "value_format": "fp32"})
    seen = []
    rows = pretrained(module)
    if way == "made":  # by this process alone, as in a script that prepares a model
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "is_initialized", lambda: False)
            module.tables.materialize()
    if way == "whole model":
        module.load_state_dict({"tables.weight": rows}, strict=False)
    else:
        module.tables.load_state_dict({"weight": rows}, strict=False)
    module.on_train_start = lambda: seen.append(whole(module))
    fit(
        module,
        steps,
        strategy={"compress": "updates", "local_steps": 1, "density": 1.0, "value_format": "fp32"},
    )
    return seen[0], whole(module)


@pytest.mark.parametrize("way", ["before", "whole model", "made"])
def test_training_starts_from_loaded_rows(ranks: Any, way: str) -> None:
    """Oracle: the rows that were loaded, one table after the other; other ranks' copies of them are
    exact.
    """
    started = together([first for first, _ in ranks(2).run(start, way, 2)])
    module = Hybrid({})
    place = 0
    for table, size in enumerate(module.tables.table_rows):
        for row in range(size):
            assert torch.equal(started[f"{table}.{row}"], pretrained(module)[place])
            place += 1


@pytest.mark.parametrize("shape", [(5, 8), (1027, 3)])
def test_other_shapes_are_named(shape: tuple[int, int]) -> None:
    tables = ShardedEmbeddingBags([1000, 20, 7], embedding_dim=8)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"`weight` has shape .*rows of all tables.*1027.* of 8 entries each"
        ):
            tables.load_state_dict({"weight": torch.zeros(shape)}, strict=False)
        tables.materialize()


def test_a_checkpoint_without_rows_says_where_they_are() -> None:
    """``load_from_checkpoint`` reads Lightning's file alone."""
    module = Hybrid({})
    module.tables.materialize()
    with saved_in_shards({"tables": module.tables}):
        saved = module.state_dict()
    said = r"`tables\.weight` is in the folder beside a Trainer's checkpoint: use `trai"
    with pytest.raises(RuntimeError, match=said):
        module.load_state_dict(saved)
    renamed = {name.replace("tables.", "rows."): value for name, value in saved.items()}
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        module.load_state_dict(renamed)
    assert "in the folder" not in str(caught.value)
