"""Growing tables on 1 to 4 ranks: against dicts and `lightning_dct.reference`, saved, resumed,
given wrong batches.
"""

import copy
import gc
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from embedding.growing import Growing, spread, train, train_beside_the_reference
from embedding.hybrid import (
    EVERYTHING,
    TABLE_ROWS,
    assert_residuals_are_conserved,
    halves,
    resume,
    together,
)
from embedding.test_hybrid import difference
from embedding.test_sharded import SETTINGS
from lightning_dct import (
    CheckpointError,
    GrowingEmbeddingBags,
    RowWiseAdagrad,
    ShardedEmbeddingBags,
)
from lightning_dct.embedding.table_files import load_row_states, load_rows, save_rows

ROOMY = {**EVERYTHING, "max_rows": 2000, "admit_after": 2}
# Rows and copies come and go all the time.
TIGHT = {
    "density": 0.1,
    "value_format": "2bit",
    "refresh_every": 5,
    "cache_rows": 20,
    "max_rows": 24,
}


@pytest.mark.parametrize(
    ("world_size", "kind", "admit_after"), [(2, "one-hot", 1), (3, "multi-hot", 2)]
)
def test_the_same_as_the_reference(
    ranks: Any, world_size: int, kind: str, admit_after: int
) -> None:
    for by_settings in ranks(world_size).run(train_all, kind, admit_after):
        for found in by_settings:
            assert (found["pooled"], found["rows"]) == (0.0, 0.0)
            assert found["evicted"] > 0
            assert 0 < found["there"] <= found["room"]


def train_all(kind: str, admit_after: int) -> list[dict[str, Any]]:
    return [train_beside_the_reference(10, kind, admit_after, **settings) for settings in SETTINGS]


def test_any_number_of_ranks_trains_the_same_model(ranks: Any) -> None:
    alone = together([part for part, _ in ranks(1).run(train, 8, ROOMY, "adagrad")])
    rows = [name for name in alone if name.endswith(" sum")]
    assert 30 < len(rows) < sum(TABLE_ROWS)
    default = GrowingEmbeddingBags(len(TABLE_ROWS), 4, seed=5, **ROOMY)._default_rows
    moved = [
        float((alone[name[: -len(" sum")]] - default[int(name[0])]).abs().max()) for name in rows
    ]
    assert min(moved) > 0
    others = together([part for part, _ in ranks(3).run(train, 8, ROOMY, "adagrad")])
    assert difference(alone, others) < 2e-5


def train_resumable(
    save: Path | None, load: Path | None, optimizer: str, exchange: dict[str, Any]
) -> Any:
    # Other than a dense sum, this one does not depend on how DistributedDataParallel has cut its
    # buckets.
    gradients = {"density": 0.2, "value_format": "bf16", "min_tensor_size": 1}
    found, evicted = train(6, exchange, optimizer, {**halves(save, load), "strategy": gradients})
    assert save is not None or evicted > 0
    return [], [found, evicted]


def test_resumes_from_before_the_first_row(ranks: Any, tmp_path: Any) -> None:
    """`Adagrad` makes its state when it is made, so the checkpoint of a table without rows must not
    take it away.
    """
    path = str(tmp_path / "early.ckpt")
    exchange = {**TIGHT, "admit_after": 4}
    straight = ranks(2).run(train, 3, exchange, "adagrad", {"max_epochs": 2})
    early = ranks(2).run(train, 3, exchange, "adagrad", {"save_to": path})
    resumed = ranks(2).run(train, 3, exchange, "adagrad", {"ckpt_path": path, "max_epochs": 2})
    assert (
        difference(
            together([part for part, _ in straight]), together([part for part, _ in resumed])
        )
        == 0.0
    )
    rows = [
        [name for part, _ in run for name in part if name.endswith(" sum")]
        for run in (early, straight)
    ]
    assert (bool(rows[0]), bool(rows[1])) == (False, True)


@pytest.mark.slow
def test_checkpoint_loads_at_another_number_of_ranks(ranks: Any, tmp_path: Any) -> None:
    path = str(tmp_path / "x.ckpt")
    exchange = {**TIGHT, "max_rows": 60}
    before = together(
        [part for part, _ in ranks(2).run(train, 4, exchange, "adagrad", {"save_to": path})]
    )
    assert len([name for name in before if name.endswith(" sum")]) > 30
    answers = ranks(3).run(resume, path, Growing, {**exchange, "max_rows": 200})
    assert difference(before, together([part for part, _ in answers])) == 0.0
    assert not any(warned for _, warned in answers)


def test_a_smaller_room_keeps_the_newest_and_says_so(ranks: Any, tmp_path: Any) -> None:
    path = str(tmp_path / "x.ckpt")
    saved = ranks(2).run(train, 4, {**TIGHT, "max_rows": 80}, "adagrad", {"save_to": path})
    before = together([part for part, _ in saved])
    answers = ranks(2).run(resume, path, Growing, {**TIGHT, "max_rows": 12})
    after = together([part for part, _ in answers])
    assert len([name for name in after if name.endswith(" sum")]) == 12
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    for _, warned in answers:
        assert len(warned) == 1
        assert "least recently requested are evicted. Raise `max_rows` to keep them" in warned[0]


def test_residuals_of_another_world_are_not_lost(ranks: Any, tmp_path: Path) -> None:
    exchange = {"density": 0.05, "value_format": "2bit", "max_rows": 2000}
    assert_residuals_are_conserved(ranks, tmp_path, 1, Growing, exchange)


def save_and_load_both(folder: str, damaged: bool) -> str:
    """Save tables of fixed size and growing ones together, and load them; what is said about
    damaged files.
    """

    def make_both() -> dict[str, ShardedEmbeddingBags]:
        both = {
            "fixed": ShardedEmbeddingBags([9, 7], 4),
            "growing": GrowingEmbeddingBags(2, 4, max_rows=50),
        }
        for tables in both.values():
            tables.materialize()
        return both

    before = make_both()
    after = make_both()
    for tables in before.values():
        tables(torch.tensor([[1, 2], [3, 0], [4, 5]])).sum().backward()
        torch.optim.SGD([tables.weight], lr=0.1).step()
    save_rows(folder, before, [])
    dist.barrier()  # as in the strategy: rank 0 writes the checksum of the index last
    if damaged and dist.get_rank() == 0:
        for file in Path(folder).glob("rank-1.rows"):
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 255
            file.write_bytes(data)
    dist.barrier()
    try:
        load_rows(folder, after)
    except CheckpointError as error:
        return str(error)
    for name, tables in before.items():
        used = tables.directory.rows.num_slots if name == "growing" else len(tables.weight)
        assert used > 0
        assert torch.equal(tables.weight[:used], after[name].weight[:used])
    return ""


@pytest.mark.parametrize("damaged", [False, True])
def test_both_kinds_of_tables_in_one_checkpoint(ranks: Any, tmp_path: Path, damaged: bool) -> None:
    for said in ranks(2).run(save_and_load_both, str(tmp_path / "rows"), damaged):
        assert ("damaged or does not fit" in said) == damaged


def test_rows_of_other_tables_are_refused(tmp_path: Path) -> None:
    fixed = ShardedEmbeddingBags([9], 4)
    growing = make(max_rows=5)
    fixed.materialize()
    growing(torch.tensor([[3]]))
    for saved, other in ((fixed, growing), (growing, fixed), (growing, make(2, max_rows=5))):
        save_rows(str(tmp_path), {"tables": saved}, [])
        with pytest.raises(CheckpointError, match="of other tables"):
            load_rows(str(tmp_path), {"tables": other})


def test_a_row_made_after_the_last_step_is_saved_with_a_new_state(tmp_path: Path) -> None:
    def adagrad(tables: GrowingEmbeddingBags) -> torch.optim.Optimizer:
        return torch.optim.Adagrad([tables.weight], initial_accumulator_value=0.5)

    tables = make(max_rows=2)
    other = make(max_rows=2)
    tables(torch.tensor([[1], [2]])).sum().backward()
    optimizer = adagrad(tables)
    optimizer.step()
    resumed = adagrad(tables)  # has not made a step yet, as after a restart
    resumed.load_state_dict(optimizer.state_dict())
    del optimizer
    gc.collect()
    tables(torch.tensor([[2], [3]]))
    save_rows(str(tmp_path), {"tables": tables}, [resumed])
    load_rows(str(tmp_path), {"tables": other})
    loaded = adagrad(other)
    load_row_states(str(tmp_path), {"tables": other}, [loaded])
    two, three = other.directory.rows.find(other.directory.rows.contents()[0])
    assert loaded.state[other.weight]["sum"][[two, three]].tolist() == [[1.5] * 4, [0.5] * 4]


def messages_of_wrong_batches(kind: type, settings: dict[str, Any]) -> tuple[list[str], list[str]]:
    """One rank after another has a wrong batch, in training and outside; what this rank is told,
    and where it was.
    """
    told: list[str] = []
    places: list[str] = []
    for training in (True, False):
        for culprit, wrong in ((0, "negative"), (1, "negative"), (1, "another number of tables")):
            tables = kind(**settings)
            tables.materialize()
            tables.exchange_group.check_order = places.append
            torch.set_grad_enabled(training)
            ids = torch.tensor([[1, 2], [3, 0]])
            if tables.exchange_group.rank == culprit:
                ids = -ids if wrong == "negative" else ids[:, :1]
            try:
                tables(ids)
                if not training:
                    tables.finish_evaluation()
            except (IndexError, ValueError) as error:
                told.append(f"{type(error).__name__}: {error}")
    torch.set_grad_enabled(True)
    return told, places


@pytest.mark.parametrize(
    ("kind", "settings", "rows", "remedy"),
    [
        (
            ShardedEmbeddingBags,
            {"tables": [9, 7]},
            "has 9 rows",
            "Correct the ids or the number of rows.",
        ),
        (
            GrowingEmbeddingBags,
            {"num_tables": 2, "max_rows": 9},
            "takes ids from 0 to 2",
            "`lightning_dct.string_ids`",
        ),
    ],
)
def test_a_wrong_batch_is_an_error_on_every_rank(
    ranks: Any, kind: type, settings: Any, rows: str, remedy: str
) -> None:
    found = ranks(3).run(messages_of_wrong_batches, kind, {**settings, "embedding_dim": 4})
    for rank, (told, places) in enumerate(found):
        assert len(told) == 6
        # Or a strategy would say that ranks are out of step.
        assert places == 3 * ["rows"] + 3 * ["exact rows"]
        for message, culprit in zip(told, (0, 1, 1, 0, 1, 1), strict=True):
            assert (f"Rank {culprit} of the process group" in message) == (rank != culprit)
        for message in (*told[:2], *told[3:5]):
            assert "IndexError" in message
            assert f"Id -1 is out of range: table 0 {rows}" in message
            assert remedy in message
        for message in (told[2], told[5]):
            assert "ValueError" in message
            assert "`ids` must have the shape [samples, 2]" in message


def make(num_tables: int = 1, **settings: Any) -> GrowingEmbeddingBags:
    tables = GrowingEmbeddingBags(num_tables, 4, **settings)
    tables.materialize()
    return tables


@pytest.mark.parametrize(
    ("make_optimizer", "fresh"),
    [
        (
            lambda rows: torch.optim.Adagrad(rows, lr=0.1, initial_accumulator_value=0.5),
            {"sum": 0.5},
        ),
        (lambda rows: RowWiseAdagrad(rows, lr=0.1), {"sum": 0.0}),
        (lambda rows: torch.optim.SparseAdam(rows, lr=0.1), {"exp_avg": 0.0, "exp_avg_sq": 0.0}),
        (lambda rows: torch.optim.SGD(rows, lr=0.1, momentum=0.9), {"momentum_buffer": 0.0}),
    ],
)
@pytest.mark.parametrize("with_closure", [True, False])
def test_a_new_row_has_a_new_optimizer_state(
    make_optimizer: Any, fresh: dict, with_closure: bool
) -> None:
    tables = make(max_rows=2)
    optimizer = make_optimizer([tables.weight])
    at_backward: list[dict[str, Tensor]] = []

    def step_on(*ids: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = tables(torch.tensor(ids).view(-1, 1)).sum()
            at_backward.append(
                {
                    name: (value.to_dense() if value.is_sparse else value).clone()
                    for name, value in optimizer.state.get(tables.weight, {}).items()
                    if torch.is_tensor(value) and value.ndim
                }
            )
            loss.backward()
            return loss

        if with_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()

    step_on(1, 2)
    step_on(2)
    step_on(3)  # in the place of 1
    assert tables.directory.rows.contents()[0].tolist() == [2, 3]
    slot, other = tables.directory.rows.find(tables.directory.rows.contents()[0])[::-1].tolist()
    for name, value in fresh.items():
        assert (at_backward[2][name][slot] == value).all()
        assert (at_backward[2][name][other] != value).all()


def test_gradients_of_an_evicted_row_are_not_those_of_the_next() -> None:
    tables = make(max_rows=2)
    for ids in ([1, 2], [2, 2], [3, 3]):  # micro-batches of one optimizer step
        (tables(torch.tensor(ids).view(-1, 1)).sum()).backward()
    two, three = tables.directory.rows.find(tables.directory.rows.contents()[0]).tolist()
    gradient = tables.weight.grad.to_dense()
    assert gradient[two].tolist() == [3.0] * 4
    assert gradient[three].tolist() == [2.0] * 4


def through_a_file(tables: GrowingEmbeddingBags) -> GrowingEmbeddingBags:
    file = io.BytesIO()
    torch.save(tables, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
def test_a_copy_goes_on_like_the_original(
    copied: Callable[[GrowingEmbeddingBags], GrowingEmbeddingBags],
) -> None:
    """With a new row, which must not step with the state of the evicted one."""
    tables = make(max_rows=2)
    optimizer = torch.optim.Adagrad([tables.weight], lr=0.1)

    def step(
        tables: GrowingEmbeddingBags, optimizer: torch.optim.Optimizer, ids: list[int]
    ) -> None:
        optimizer.zero_grad()
        tables(torch.tensor(ids).view(-1, 1)).sum().backward()
        optimizer.step()

    step(tables, optimizer, [1, 2])
    tables(torch.tensor([[1]]))  # without a backward
    other = copied(tables)
    others = torch.optim.Adagrad([other.weight], lr=0.1)
    others.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(tables, optimizer, [2, 3])
    step(other, others, [2, 3])
    assert other.traffic.totals.evicted_rows == 1
    assert torch.equal(other.weight, tables.weight)


def test_ids_without_rows_give_the_default_row_and_learn_nothing() -> None:
    tables = make(2, max_rows=6, admit_after=3, seed=4)
    ids = torch.tensor([[5, 5]])
    default = tables(torch.tensor([[7, 8]])).detach()
    assert not torch.equal(default[0, 0], default[0, 1])
    optimizer = torch.optim.SGD([tables.weight], lr=0.1)
    for look_up in range(3):
        optimizer.zero_grad()
        pooled = tables(ids)
        assert torch.equal(pooled.detach(), default)
        assert tables.traffic.totals.admitted_rows == (2 if look_up == 2 else 0)
        with torch.no_grad():
            tables(torch.tensor([[6, 6]]))  # does not count
        pooled.sum().backward()
        optimizer.step()
    assert torch.allclose(tables(ids).detach(), default - 0.1)
    with torch.no_grad():
        assert torch.equal(tables(torch.tensor([[6, 6]])), default)


def test_a_state_dict_carries_rows_and_where_they_are() -> None:
    tables = make(max_rows=5)
    other = make(max_rows=5)
    ids = spread(torch.arange(4)).view(-1, 1)
    with torch.no_grad():
        tables(ids)
    tables(ids).sum().backward()
    with torch.no_grad():
        tables.weight.normal_()
    other.load_state_dict(tables.state_dict())
    with torch.no_grad():
        assert torch.equal(other(ids), tables(ids))
    assert tables(ids).unique().numel() == 16


def test_rows_that_do_not_fit_are_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a state of other tables, before there is a place for them, and of a process that becomes
    one of several.
    """
    tables = make(max_rows=5)
    remedy = r"continue from a checkpoint: `trainer\.fit\(ckpt_path"
    for other in (make(max_rows=4), GrowingEmbeddingBags(1, 4, max_rows=5)):
        with pytest.raises(
            RuntimeError, match=rf"`weight` has shape \[5, 4\]\. Growing tables .*{remedy}"
        ):
            other.load_state_dict(tables.state_dict())
    tables(torch.tensor([[3]]))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="cannot become one of several"):
        tables.materialize()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"num_tables": 0, "max_rows": 1}, ValueError, "`num_tables` must be at least 1"),
        ({"num_tables": [3], "max_rows": 1}, TypeError, "`num_tables` must be a whole number"),
        ({"num_tables": 1, "max_rows": 0}, ValueError, "`max_rows` must be at least 1"),
        (
            {"num_tables": 1, "max_rows": 1, "admit_after": 0},
            ValueError,
            "`admit_after` must be at least 1",
        ),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        GrowingEmbeddingBags(embedding_dim=4, **settings)
