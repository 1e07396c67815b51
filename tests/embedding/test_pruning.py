"""Pruned rows on 1 to 4 ranks: against a plain loop with masks, saved, resumed, loaded elsewhere,
and misused.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule

from distributed.training import message_of, trainer_for
from embedding.hybrid import ALL_GRADIENTS, EVERYTHING, TABLE_ROWS, batches, halves, together
from embedding.pruned import DIM, Pruned, load, train, train_plainly
from embedding.test_hybrid import difference
from lightning_dct import DCTStrategy, EmbeddingPruning, GrowingEmbeddingBags, ShardedEmbeddingBags
from lightning_dct.embedding.pruning import INDEX_BYTES_A_ROW, PIECES, prune

FEW = {"density": 0.1, "value_format": "2bit", "refresh_every": 5, "cache_rows": 20}
KEEP = 0.5


def masks_in(found: dict[str, torch.Tensor]) -> dict[str, int]:
    return {
        name.removesuffix(" mask"): int(value)
        for name, value in found.items()
        if name.endswith(" mask")
    }


def without_states(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in found.items() if " " not in name}


def train_too_short() -> None:
    with pytest.warns(
        UserWarning, match=r"at_step=50.* has pruned nothing: the run has ended at step 3"
    ):
        train(3, EVERYTHING, 50)


def test_a_run_that_ends_before_it_prunes_says_so(ranks: Any) -> None:
    ranks(1).run(train_too_short)


@pytest.mark.parametrize(("world_size", "optimizer"), [(2, "adagrad"), (3, "sgd")])
def test_the_same_as_whole_rows_that_are_masked(
    ranks: Any, world_size: int, optimizer: str
) -> None:
    answers = ranks(world_size).run(train, 9, EVERYTHING, 5, optimizer)
    found = together([part for part, _, _ in answers])
    masks = masks_in(found)
    kept = sum(mask.bit_count() for mask in masks.values())
    assert len(masks) == sum(TABLE_ROWS)
    assert 0 < kept < PIECES * len(masks)
    assert 0 in masks.values()
    for _, shape, owned in answers:
        assert shape[1] == DIM // PIECES
        # Rows that were never requested are at their initial value, so less than the budget may be
        # kept.
        assert 4 * shape[0] * shape[1] + INDEX_BYTES_A_ROW * owned <= KEEP * 4 * DIM * owned
    (plain,) = ranks(1).run(train_plainly, 9, 5, masks, optimizer)
    assert difference(without_states(found), plain) < 2e-5
    assert difference({"0.0": found["0.0"]}, {"0.0": torch.zeros(DIM)}) > 1e-2


def train_resumable(save: Path | None, load: Path | None, optimizer: str, at_step: int) -> Any:
    """Saved after step 6: pruned before, or counting requests still."""
    found = run(6, at_step, optimizer, halves(save, load))
    assert bool(masks_in(found)) == (save is None or at_step < 6)
    return [], found


def run(
    number: int, at_step: int, optimizer: str, settings: dict[str, Any]
) -> dict[str, torch.Tensor]:
    # All gradients of three ranks at once are summed in another order after a resume.
    strategy = {"density": 0.2, "value_format": "bf16", "min_tensor_size": 1}
    return train(number, FEW, at_step, optimizer, strategy=strategy, **settings)[0]


@pytest.mark.parametrize(("saved", "loaded", "at_step"), [(2, 1, 3), (3, 2, 9)])
def test_checkpoint_loads_at_another_number_of_ranks(
    ranks: Any, tmp_path: Any, saved: int, loaded: int, at_step: int
) -> None:
    path = str(tmp_path / "x.ckpt")
    before = together(ranks(saved).run(run, 4, at_step, "adagrad", {"save_to": path}))
    assert len([name for name in before if name.endswith((" mask", " requests"))]) == sum(
        TABLE_ROWS
    )
    assert difference(before, together(ranks(loaded).run(load, path))) == 0.0


def test_weights_of_a_single_process_load_with_and_without_pruning() -> None:
    before = make_pruned()
    places = np.arange(40)
    state = before.state_dict()
    assert state["weight"].shape == (40, DIM)
    again = make()
    never = make()
    again.load_state_dict(state)
    never.load_state_dict({**state, "_extra_state": never.get_extra_state()})
    assert again.weight.shape == before.weight.shape
    assert never.weight.shape == (40, DIM)
    for loaded in (again, never):
        assert torch.equal(loaded.own_rows(places), before.own_rows(places))
    again.load_state_dict(make().state_dict())  # whole rows into pruned ones
    assert again.weight.shape == (40, DIM)


def test_states_gradients_and_scores_against_a_loop() -> None:
    tables = make()
    optimizer = torch.optim.SGD([tables.weight], momentum=0.9)
    train_alone(tables, optimizer)
    tables(torch.tensor([[3, 1]])).sum().backward()  # a gradient that waits for its step
    rows = tables.weight.detach().clone()
    counts = tables.row_requests.clone()
    momentum = optimizer.state[tables.weight]["momentum_buffer"].to_dense()
    gradient = tables.weight.grad.to_dense()
    start = make().weight.detach()
    prune(tables, 0.3, [optimizer])
    scores = [
        (
            float((rows - start)[row, 2 * piece : 2 * piece + 2].square().sum()) * int(counts[row]),
            row,
            piece,
        )
        for row in range(40)
        for piece in range(PIECES)
    ]
    budget = int((0.3 * 4 * DIM - INDEX_BYTES_A_ROW) * 40 / (4 * DIM / PIECES))
    best = {
        (row, piece) for score, row, piece in sorted(scores, reverse=True)[:budget] if score > 0
    }
    kept = {
        (row, piece)
        for row in range(40)
        for piece in range(PIECES)
        if tables.kept.masks[row] >> piece & 1
    }
    assert kept == best
    for place, (row, piece) in enumerate(sorted(kept)):
        part = slice(2 * piece, 2 * piece + 2)
        assert torch.equal(tables.weight[place], rows[row, part])
        assert torch.equal(tables.weight.grad.to_dense()[place], gradient[row, part])
        assert torch.equal(
            optimizer.state[tables.weight]["momentum_buffer"].to_dense()[place], momentum[row, part]
        )


def make() -> ShardedEmbeddingBags:
    tables = ShardedEmbeddingBags([30, 10], DIM, seed=2)
    tables.materialize()
    return tables


def make_pruned() -> ShardedEmbeddingBags:
    tables = make()
    optimizer = torch.optim.Adagrad([tables.weight], lr=0.1)
    train_alone(tables, optimizer)
    prune(tables, 0.3, [optimizer])
    train_alone(tables, optimizer)
    return tables


def train_alone(tables: ShardedEmbeddingBags, optimizer: torch.optim.Optimizer) -> None:
    if tables.kept is None:
        tables.row_requests = torch.zeros(40, dtype=torch.int32)
    for step in range(5):
        ids = torch.randint(0, 10, (6, 2), generator=torch.manual_seed(step))
        optimizer.zero_grad()
        (tables(ids) * torch.arange(DIM)).sin().sum().backward()
        optimizer.step()


class Without(LightningModule):
    """A model whose tables grow."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = GrowingEmbeddingBags(2, 4, max_rows=10)
        self.top = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.top(self.tables(batch[0][:, :2])).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def refused(case: str, path: str) -> str:
    """What a wrong use says."""
    module = Pruned({})
    callback = EmbeddingPruning(0.5, 2)
    settings = {}
    if case == "no tables":
        module = Without()
    elif case == "odd":
        module.tables = ShardedEmbeddingBags(TABLE_ROWS, 6)
    elif case == "too little":
        callback = EmbeddingPruning(0.04, 2)
    elif case == "too late":
        trainer = trainer_for(DCTStrategy(**ALL_GRADIENTS))
        trainer.fit(Pruned({}), batches(3))
        trainer.save_checkpoint(path)
        settings = {"ckpt_path": path}
    trainer = trainer_for(DCTStrategy(**ALL_GRADIENTS), callbacks=[callback], max_epochs=2)
    return message_of(trainer.fit, module, batches(3), **settings)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no tables", "set their `max_rows` instead"),
        ("odd", "choose an `embedding_dim` that 4 divides"),
        ("too little", "raise `keep`"),
        ("too late", "Raise `at_step`"),
    ],
)
def test_misuse_is_refused_with_a_remedy(
    ranks: Any, tmp_path: Any, case: str, message: str
) -> None:
    for said in ranks(2).run(refused, case, str(tmp_path / "x.ckpt")):
        assert message in said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0.0}, "share of the rows' bytes"),
        ({"keep": 1.5}, "must be in"),
        ({"at_step": 0}, "at least 1"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmbeddingPruning(**settings)
