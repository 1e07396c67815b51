"""Hybrid parallelism through a Trainer: any number of ranks trains the same model, and checkpoints
carry it all.
"""

import copy
import itertools
import os

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor
from torch.utils.data import DataLoader

from distributed.harness import RankFailure
from distributed.training import Watch, launched, message_of, trainer_for
from embedding.growing import Growing
from embedding.hybrid import (
    ALL_GRADIENTS,
    EVERYTHING,
    TABLE_ROWS,
    Batches,
    Hybrid,
    assert_residuals_are_conserved,
    batches,
    fit,
    halves,
    load,
    resume,
    together,
    train,
    whole,
)
from lightning_dct import DCTStrategy, EmbeddingPruning, ShardedEmbeddingBags
from lightning_dct.fabric import DCTStrategy as FabricStrategy

FEW = {"density": 0.1, "value_format": "2bit", "refresh_every": 5}
SMALL_CACHE = {**FEW, "cache_rows": 20}


def run(number, exchange, optimizer, settings):
    return train(number, exchange, optimizer, **settings)


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("row-wise adagrad", {}),
        ("sgd", {"gradient_clip_val": 0.05}),
        ("adagrad", {"gradient_clip_val": 0.003, "gradient_clip_algorithm": "value"}),
    ],
)
def test_any_number_of_ranks_trains_the_same_model(ranks, optimizer, settings):
    alone = together(ranks(1).run(run, 6, EVERYTHING, optimizer, settings))
    start = together(ranks(1).run(run, 0, EVERYTHING, optimizer, settings))
    # Adagrad makes its sums in advance.
    weights = [name for name in start if not name.endswith(" sum")]
    assert len(weights) == sum(TABLE_ROWS) + 4
    assert (
        difference({name: alone[name] for name in weights}, {name: start[name] for name in weights})
        > 1e-3
    )
    assert difference(together(ranks(3).run(run, 6, EVERYTHING, optimizer, settings)), alone) < 2e-5


def test_accumulated_gradients_train_the_same_model(ranks):
    settings = {"accumulate_grad_batches": 2}
    alone = together(ranks(1).run(run, 6, EVERYTHING, "sgd", settings))
    assert difference(together(ranks(2).run(run, 6, EVERYTHING, "sgd", settings)), alone) < 1e-5


def train_resumable(save, load, optimizer, exchange):
    gradients = {"density": 0.2, "value_format": "bf16", "min_tensor_size": 1}
    return [], train(6, exchange, optimizer, strategy=gradients, **halves(save, load))


@pytest.mark.slow
def test_checkpoint_loads_at_another_number_of_ranks(ranks, tmp_path):
    path = str(tmp_path / "x.ckpt")
    before = together(ranks(3).run(run, 4, FEW, "adagrad", {"save_to": path}))
    assert len([name for name in before if name.endswith(" sum")]) == sum(TABLE_ROWS)
    after = together([part for part, _ in ranks(2).run(resume, path, Hybrid, FEW)])
    assert difference(before, after) == 0.0


@pytest.mark.slow
def test_residuals_of_another_world_are_not_lost(ranks, tmp_path):
    assert_residuals_are_conserved(ranks, tmp_path, 3, Hybrid, {**FEW, "density": 0.05})


def predict_unequally(numbers):
    """Ranks with other numbers of batches predict and validate."""
    module = Hybrid(FEW)
    trainer = trainer_for(DCTStrategy(**ALL_GRADIENTS))
    trainer.fit(module, batches(3))
    number = numbers[module.tables.exchange_group.rank]
    predicted = trainer.predict(module, batches(number)) or []
    trainer.validate(module, batches(number), verbose=False)
    return whole(module), [Batches.batch(index) for index in range(number)], predicted


def test_unequal_numbers_of_batches_do_not_hang_and_rows_are_exact(ranks):
    numbers = [2, 5, 1]
    answers = ranks(len(numbers)).run(predict_unequally, numbers)
    weights = together([part for part, _, _ in answers])
    module = Hybrid(FEW)
    for name, parameter in module.top.named_parameters():
        parameter.data.copy_(weights[name])
    for (_, inputs, predicted), number in zip(answers, numbers, strict=True):
        assert len(predicted) == number
        for (ids, _), output in zip(inputs, predicted, strict=True):
            rows = torch.stack(
                [
                    torch.stack(
                        [weights[f"{table}.{int(row)}"] for table, row in enumerate(sample)]
                    )
                    for sample in ids
                ]
            )
            torch.testing.assert_close(output, module.top(rows.flatten(1)).squeeze(1).detach())


class TwoModules(LightningModule):
    """Odd ranks ask the second of two modules first."""

    def __init__(self):
        super().__init__()
        self.first = ShardedEmbeddingBags([30, 4], 4, seed=1)
        self.second = ShardedEmbeddingBags([7, 50, 3], 2, seed=2)

    def predict_step(self, batch, batch_idx):
        ids = batch
        asked = {}
        for name in ("second", "first") if self.global_rank % 2 else ("first", "second"):
            asked[name] = getattr(self, name)(ids[:, :2] if name == "first" else ids[:, 2:])
        return torch.cat([asked["first"].flatten(1), asked["second"].flatten(1)], dim=1)


def ids_of_two_modules(number):
    columns = [
        torch.randint(0, rows, (3, number), generator=torch.manual_seed(rows))
        for rows in (30, 4, 7, 50, 3)
    ]
    return list(torch.stack(columns, dim=2).unbind(1))


def predict_with_two_modules(numbers):
    module = TwoModules()
    trainer = trainer_for(DCTStrategy())
    return trainer.predict(
        module, DataLoader(ids_of_two_modules(numbers[int(os.environ["RANK"])]), batch_size=None)
    )


def test_two_modules_and_unequal_numbers_of_batches(ranks):
    numbers = [2, 1, 4]
    alone = TwoModules()
    alone.first.materialize()
    alone.second.materialize()
    for predicted, number in zip(
        ranks(len(numbers)).run(predict_with_two_modules, numbers), numbers, strict=True
    ):
        assert len(predicted) == number
        for ids, output in zip(ids_of_two_modules(number), predicted, strict=True):
            torch.testing.assert_close(output, alone.predict_step(ids, 0).detach(), rtol=0, atol=0)


def conserve(exchange):
    """Sum up the gradients this rank computed and those its rows received, by table and row, in
    fp64.
    """
    tables = ShardedEmbeddingBags(TABLE_ROWS, 4, seed=5, **exchange)
    tables.materialize()
    rank = tables.exchange_group.rank
    computed = {}
    received = {}
    for step in range(30):
        tables.advance(step)
        ids = Batches.batch(step)[0]
        tables.weight.grad = None
        pooled = tables(ids)
        pooled.retain_grad()
        (pooled * pooled.detach().cos() + pooled.square()).sum().backward()
        for sample, gradient in zip(ids, pooled.grad, strict=True):
            for table, row in enumerate(sample.tolist()):
                computed[table, row] = computed.get((table, row), 0) + gradient[table].double()
        grad = tables.weight.grad
        found = tables.placement.rows_of(rank, grad.indices()[0].numpy())
        for table, row, values in zip(*found, grad.values(), strict=True):
            key = int(table), int(row)
            received[key] = received.get(key, 0) + values.double() * tables.placement.world_size
        with torch.no_grad():
            tables.weight.add_(grad, alpha=-0.05)
    held = {}
    rows = tables.own_copies
    evictions = rows.cache.capacity < sum(
        tables.placement.owned_rows[owner] for owner in rows.codes
    )
    for owner in rows.codes:
        places, slots = rows.cache.contents(owner)
        for table, row, slot in zip(*tables.placement.rows_of(owner, places), slots, strict=True):
            held[int(table), int(row)] = rows.residual[slot].double()
    copies, mirrors = (
        {
            peer: (places, end.copies[slots])
            for peer in end.codes
            for places, slots in [end.cache.contents(peer)]
        }
        for end in (tables.own_copies, tables.peer_copies)
    )
    return computed, received, held, copies, mirrors, evictions


@pytest.mark.parametrize(
    ("world_size", "value_format", "cache_rows"),
    [(2, "1bit", 20), (3, "fp32", 20), (3, "2bit", 1000)],
)
def test_nothing_is_lost(ranks, world_size, value_format, cache_rows):
    exchange = {
        "density": 0.1,
        "value_format": value_format,
        "refresh_every": 7,
        "cache_rows": cache_rows,
    }
    answers = ranks(world_size).run(conserve, exchange)
    total: dict = {}
    for computed, received, held, *_ in answers:
        for key, values in computed.items():
            total[key] = total.get(key, 0) + values
        for part in (received, held):
            for key, values in part.items():
                total[key] = total.get(key, 0) - values
    size = max(
        float(values.abs().max()) for computed, *_ in answers for values in computed.values()
    )
    # What is left of evicted rows is rounded to int8, by at most 1/254 of the row's largest entry
    # and an eleventh more.
    is_rounded = cache_rows == 20 and value_format != "fp32"
    assert (
        max(float(values.abs().max()) for values in total.values())
        < (5e-3 if is_rounded else 1e-5) * size
    )
    # And the two ends of every pair hold the same copies, to the last bit.
    for rank, (*_, copies, _, evictions) in enumerate(answers):
        assert (evictions > 0) == (cache_rows == 20)
        for owner, (places, rows) in copies.items():
            mirrored_places, mirrored = answers[owner][4][rank]
            assert places.tolist() == mirrored_places.tolist()
            assert torch.equal(rows, mirrored)


def refuse_scaler():
    from lightning.pytorch.plugins import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    trainer_for(DCTStrategy(), plugins=[plugin]).fit(Hybrid(FEW), batches(2))


def test_a_loss_scaler_is_refused(ranks):
    with pytest.raises(RankFailure, match="bf16-mixed"):
        ranks(2).run(refuse_scaler)


def save_weights_only(path):
    module = Hybrid(FEW)
    trainer = trainer_for(DCTStrategy(**ALL_GRADIENTS))
    trainer.fit(module, batches(3))
    trainer.save_checkpoint(path, weights_only=True)
    return whole(module)


def test_weights_alone_carry_the_rows(ranks, tmp_path):
    path = str(tmp_path / "x.ckpt")
    before = together(ranks(2).run(save_weights_only, path))
    assert difference(before, together(ranks(3).run(load, path))) == 0.0
    assert "tables.weight" not in torch.load(path, weights_only=True)["state_dict"]


def keep_a_state():
    module = Hybrid(EVERYTHING)
    fit(module, 3)
    kept = copy.deepcopy(module.state_dict())
    fit(module, 3)
    moved = not torch.equal(kept["tables.weight"], module.tables.weight)
    module.load_state_dict(kept)
    return moved, torch.equal(kept["tables.weight"], module.tables.weight)


def test_a_state_between_two_fits_has_the_rows(ranks):
    """Oracle: the rows themselves, before the second fit and after they are loaded; of each rank
    its own.
    """
    assert ranks(2).run(keep_a_state) == [(True, True)] * 2


class Inside(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        given = Hybrid(EVERYTHING)
        self.tables = given.tables
        self.top = given.top

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.tables(ids).flatten(1)).squeeze(1)


class Compiled(Hybrid):
    """Its tables are in a compiled module, whose parameters have other names."""

    def __init__(self) -> None:
        super().__init__(EVERYTHING)
        del self.tables, self.top
        self.inside = torch.compile(Inside(), backend="eager")

    def forward(self, ids: Tensor) -> Tensor:
        return self.inside(ids)


def train_compiled(compiled):
    module = Compiled() if compiled else Hybrid(EVERYTHING)
    fit(module, 4)
    return (module.inside._orig_mod if compiled else module).tables.weight.detach()


def test_tables_in_a_compiled_module(ranks):
    """Oracle: the same model, not compiled: every rank keeps and trains its own rows."""
    for found, expected in zip(
        ranks(2).run(train_compiled, True), ranks(2).run(train_compiled, False), strict=True
    ):
        torch.testing.assert_close(found, expected)


def set_up_in_fabric():
    launched(FabricStrategy()).setup_module(Hybrid(EVERYTHING))


def test_fabric_refuses_tables(ranks):
    with pytest.raises(
        RankFailure,
        match=r"cannot hold `ShardedEmbeddingBags` \('tables'\).*Use Lightning's Trainer",
    ):
        ranks(2).run(set_up_in_fabric)


def train_averaged():
    module, watch = Hybrid(EVERYTHING), Watch(look=lambda _: module.tables.weight.detach().clone())
    fit(module, 6, callbacks=[WeightAveraging(), watch])
    return module.tables.weight.detach(), torch.stack(watch.seen).mean(dim=0)


def test_rows_are_averaged(ranks):
    """Oracle: the mean of a rank's rows after each step, by hand; the callback copies the model,
    tables included.
    """
    for averaged, expected in ranks(2).run(train_averaged):
        torch.testing.assert_close(averaged, expected)


def average_rows_that_move():
    grows = Growing({"max_rows": 200})
    return [
        message_of(lambda: fit(grows, 1, callbacks=[WeightAveraging()])),
        message_of(
            lambda: fit(
                Hybrid(EVERYTHING), 1, callbacks=[WeightAveraging(), EmbeddingPruning(0.5, 10)]
            )
        ),
    ]


def test_averages_of_rows_that_change_places_are_refused(ranks):
    for said in itertools.chain(*ranks(2).run(average_rows_that_move)):
        assert "rows of different ids would be mixed. Remove the callback that averages" in said


def train_in_eval_mode(frozen):
    module = Hybrid(FEW)
    module.tables.eval()
    module.tables.requires_grad_(not frozen)
    module.on_train_start = lambda: starts.append(module.tables.weight.detach().clone())
    starts = []
    fit(module, 20)
    tables = module.tables
    moved = (tables.weight != starts[0]).any(dim=1).sum()
    waiting = len(tables.evicted), len(tables.collected.parts)
    return int(moved), waiting, tables.traffic.totals.bytes_sent


def test_whether_a_gradient_is_wanted_decides(ranks):
    """Pretrained modules are often in eval mode, and train; frozen tables read exact rows, and
    nothing piles up.
    """
    for moved, _, sent in ranks(2).run(train_in_eval_mode, False):
        assert moved > 20
        assert sent > 0
    for moved, waiting, _ in ranks(2).run(train_in_eval_mode, True):
        assert (moved, waiting) == (0, (0, 0))


def look_up_without_backward():
    tables = ShardedEmbeddingBags([400], 4, cache_rows=8)
    tables.materialize()
    for step in range(40):
        tables(torch.arange(40).view(-1, 1) * 10 + step % 10)
    return len(tables.evicted) + len(tables.collected.parts)


def test_nothing_piles_up_without_a_backward(ranks):
    assert max(ranks(2).run(look_up_without_backward)) < 20
