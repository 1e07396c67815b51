"""What users of tables often do wrong: each ends in one error that says what to do instead."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distributed.training import message_of, rank
from embedding.hybrid import TABLE_ROWS, Hybrid, fit
from lightning_dct import (
    AdamWithRows,
    CheckpointError,
    EmbeddingPruning,
    GrowingEmbeddingBags,
    RowWiseAdagrad,
    ShardedEmbeddingBags,
    string_ids,
)
from lightning_dct.embedding.table_files import load_rows, save_rows

FIXED = ShardedEmbeddingBags
GROWING = GrowingEmbeddingBags
# As `printf %s STRING | b2sum -l 64` shows them.
HASHES = {
    "": 0xE4A6A0577479B2B4,
    "user_7": 0x173D7C945C8D989E,
    "shoes": 0x85E8E821BB46B71C,
    "größe": 0xF4F8E155C9329AE9,
    "日本": 0xE83335CFE1549B3A,
}


def test_ids_of_strings() -> None:
    """Oracle: another program."""
    ids = string_ids(list(HASHES))
    assert ids.dtype == torch.int64
    assert ids.tolist() == [value % 2**63 for value in HASHES.values()]
    assert string_ids(list(HASHES), rows=1000).tolist() == [
        value % 1000 for value in HASHES.values()
    ]
    pairs = [["user_7", "shoes"], ["user_7", ""]]
    for given in (pairs, np.array(pairs), tuple(map(tuple, pairs))):
        assert string_ids(given).tolist() == [[ids[1], ids[2]], [ids[1], ids[0]]]
    assert string_ids([]).shape == (0,)


@pytest.mark.parametrize(
    "given", [["a", None], ["a", 3], [float("nan")], [["a"], ["b", "c"]], [b"a"], "user_7"]
)
def test_what_is_no_string_has_no_id(given: Any) -> None:
    with pytest.raises(TypeError, match="`strings` must be"):
        string_ids(given)


def test_ids_of_strings_are_below_the_rows() -> None:
    with pytest.raises(ValueError, match="`rows`"):
        string_ids(["a"], rows=0)


def give(ids: Any, offsets: Any, weights: Any) -> str:
    """Rank 1 gives what is no tensor, rank 0 a right batch."""
    tables = ShardedEmbeddingBags([9, 7], 4)
    tables.materialize()
    if rank() == 0:
        return message_of(tables, torch.tensor([[1, 2]]))
    return message_of(tables, ids, offsets, weights)


@pytest.mark.parametrize(
    ("ids", "offsets", "weights", "says"),
    [
        (
            [[1, 2]],
            None,
            None,
            ["`ids` must be a tensor", "'list'", "`torch.as_tensor(ids)`", "string_ids"],
        ),
        (np.array([[1, 2]]), None, None, ["`ids` must be a tensor", "'ndarray'"]),
        (None, None, None, ["`ids` must be a tensor", "'NoneType'"]),
        (torch.tensor([1, 2]), [0, 1, 2], None, ["`offsets` must be a tensor", "'list'"]),
        (torch.tensor([[1, 2]]), None, [0.5, 0.5], ["`per_sample_weights` must be a tensor"]),
    ],
)
def test_what_is_no_tensor_is_an_error_on_every_rank(
    ranks: Any, ids: Any, offsets: Any, weights: Any, says: list[str]
) -> None:
    for message in ranks(2).run(give, ids, offsets, weights):
        for words in says:
            assert words in message


class Penalised(Hybrid):
    """Its loss has an L2 penalty over all parameters, or over those whose names do not begin with a
    word.
    """

    but = "nothing"

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        some = [one for name, one in self.named_parameters() if not name.startswith(self.but)]
        return super().training_step(batch, batch_idx) + 0.01 * sum(
            one.square().sum() for one in some
        )


def penalise(but: str) -> str:
    module = Penalised({})
    module.but = but
    return message_of(fit, module, 2) if but == "nothing" else str(fit(module, 2))


def test_a_penalty_over_all_rows_is_refused(ranks: Any) -> None:
    """Oracle: the parameter's name; and the run that leaves it out, which ends well."""
    for message in ranks(2).run(penalise, "nothing"):
        assert "dense gradient, as of an L2 penalty over `model.parameters()`" in message
        assert "Leave `tables.weight` out of the penalty" in message
    assert ranks(2).run(penalise, "tables.weight") == ["None"] * 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = ShardedEmbeddingBags([9, 7], 4)
        self.top = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.ones(()))
        self.tables.materialize()

    def forward(self, ids: Tensor) -> Tensor:
        return self.scale * self.top(self.tables(ids).flatten(1)).sum()


def step(model: Model, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.tensor([[1, 2], [8, 0]])).backward()
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.NAdam,
        partial(torch.optim.SGD, weight_decay=0.1),
        partial(torch.optim.Adagrad, weight_decay=0.1),
    ],
)
def test_optimizers_without_sparse_gradients_name_those_with(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    model = Model()
    optimizer = kind(model.parameters(), lr=0.1)
    name = type(optimizer).__name__
    with pytest.raises(ValueError, match=f"`{name}` does not step the rows of ") as caught:
        step(model, optimizer)
    assert "`RowWiseAdagrad`" in str(caught.value)
    assert "with two groups: `AdamWithRows([{'params': " in str(caught.value)


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.SGD,
        partial(torch.optim.SGD, momentum=0.9),
        partial(AdamWithRows, weight_decay=0.1),
        torch.optim.Adagrad,
        RowWiseAdagrad,
        AdamWithRows,
    ],
)
def test_optimizers_with_sparse_gradients_step(kind: Callable[..., torch.optim.Optimizer]) -> None:
    model = Model()
    before = model.tables.weight.detach().clone()
    for _ in range(2):
        step(model, kind(model.parameters(), lr=0.1))
    assert not torch.equal(before, model.tables.weight)


def test_rows_of_an_optimizer_of_their_own_and_frozen_ones() -> None:
    model = Model()
    others = [*model.top.parameters(), model.scale]
    step(
        model,
        torch.optim.SparseAdam([model.tables.weight], lr=0.1),
        torch.optim.Adam(others, lr=0.1),
    )
    groups = [
        {"params": model.tables.parameters()},
        {"params": others, "weight_decay": 0.1},
    ]
    step(model, torch.optim.SGD(groups, lr=0.1))
    model.tables.requires_grad_(False)
    model.tables.weight.grad = None
    step(model, torch.optim.Adam(model.parameters(), lr=0.1))


class Larger(Hybrid):
    def __init__(self, exchange: dict[str, Any], optimizer: str = "sgd") -> None:
        super().__init__(exchange, optimizer)
        self.tables = ShardedEmbeddingBags(
            [TABLE_ROWS[0] + 5, *TABLE_ROWS[1:]], self.dim, **exchange
        )


def resume_with_more_rows(path: str) -> str:
    fit(Hybrid({}), 2, save_to=path)
    return message_of(fit, Larger({}), 2, path, max_epochs=2)


def test_tables_that_have_grown_since_a_checkpoint_are_not_called_damaged(
    ranks: Any, tmp_path: Path
) -> None:
    for message in ranks(2).run(resume_with_more_rows, str(tmp_path / "x.ckpt")):
        assert (
            "table '0' of 'tables' had 30 rows of dim 4 when it was saved, and the model's has 35"
            in message
        )
        assert "Resume with the tables that were saved." in message
        assert "damaged" not in message


def made(tables: ShardedEmbeddingBags) -> ShardedEmbeddingBags:
    tables.materialize()
    return tables


@pytest.mark.parametrize(
    ("saved", "other", "name", "says"),
    [
        (
            partial(FIXED, [9, 7], 4),
            partial(FIXED, [9, 8], 4),
            "tables",
            "7 rows of dim 4",
        ),
        (partial(FIXED, [9], 4), partial(FIXED, [9, 3], 4), "tables", "had 1 tables"),
        (partial(FIXED, [9, 3], 4), partial(FIXED, [9], 4), "tables", "had 2 tables"),
        (partial(FIXED, [9], 4), partial(FIXED, [9], 8), "tables", "9 rows of dim 4"),
        (
            partial(FIXED, [9], 4),
            partial(FIXED, [9], 4),
            "rows",
            "no tables were saved under the name 'rows'",
        ),
        (
            partial(GROWING, 1, 4, max_rows=9),
            partial(GROWING, 1, 8, max_rows=9),
            "tables",
            "any number of rows of dim 4",
        ),
    ],
)
def test_rows_of_other_tables_say_what_differs(
    tmp_path: Path, saved: Callable[..., Any], other: Callable[..., Any], name: str, says: str
) -> None:
    save_rows(str(tmp_path), {"tables": made(saved())}, [])
    with pytest.raises(CheckpointError, match="are whole, and of other tables") as caught:
        load_rows(str(tmp_path), {name: made(other())})
    assert says in str(caught.value)
    load_rows(str(tmp_path), {"tables": made(saved())})


def test_pruned_rows_are_those_of_the_same_tables(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(resume_pruned, str(tmp_path / "x.ckpt"))


def resume_pruned(path: str) -> None:
    fit(
        Hybrid({}, "row-wise adagrad"),
        4,
        save_to=path,
        callbacks=[EmbeddingPruning(keep=0.5, at_step=2)],
    )
    fit(
        Hybrid({}, "row-wise adagrad"),
        4,
        path,
        max_epochs=2,
        callbacks=[EmbeddingPruning(keep=0.5, at_step=2)],
    )
