"""Sparse gradients of embeddings are averaged before a step, as DistributedDataParallel does."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from differences import assert_same
from distributed.training import Manual, fit, rank
from lightning_dct import DCTStrategy, Updates
from lightning_dct.sync.row_gradients import RowCode, weights_of_rows
from strategies_for_hypothesis import examples

RANKS = 2
ROWS = 40
WIDTH = 5
STEPS = 24
RATE = 0.05
EXACT: dict[str, Any] = {"local_steps": 1, "density": 1.0, "value_format": "fp32"}


class Bags(nn.Module):
    """Means of rows -> a number. Some batches of rank 1 have no rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, sparse=True)
        self.top = nn.Linear(WIDTH, 1)

    def loss(self, step: int, of_rank: int) -> Tensor:
        drawn = torch.Generator().manual_seed(100 * step + of_rank)
        rows = torch.randint(ROWS, (6, 3), generator=drawn)
        if of_rank and step % 3 == 0:
            return self.top(torch.ones(WIDTH)).square().mean()
        return (self.top(self.bags(rows)).squeeze(1) - rows.sum(1) / ROWS).square().mean()


def optimizers_of(model: Bags, kind: type[Optimizer]) -> list[Optimizer]:
    """Steps of SGD have the step of the mean gradient as their mean."""
    return [kind(model.bags.parameters(), lr=RATE), SGD(model.top.parameters(), lr=RATE)]  # type: ignore[call-arg]


def dense_training(kind: type[Optimizer]) -> dict[str, Tensor]:
    """Both ranks' batches in one process: the plainest mean of gradients."""
    model = Bags()
    optimizers = optimizers_of(model, kind)
    for step in range(STEPS):
        sum(model.loss(step, of_rank) / RANKS for of_rank in range(RANKS)).backward()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def train(
    kind: type[Optimizer], has_closure: bool, settings: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor], float, float]:
    """The shared and the own rows, the ratio of bytes, and the dense bytes of the rows."""
    model = Bags()
    rows, top = optimizers_of(model, kind)
    updates = Updates(model, [rows, top], steps=STEPS, **settings)
    dense = 0.0
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            model.zero_grad()
            loss = model.loss(step, rank())
            loss.backward()
            return loss

        if has_closure:
            rows.step(closure)
        else:
            closure()
            rows.step()
        top.step()
    gradients = updates.synchronizer.sparse
    assert gradients == {model.bags.weight}
    own = copy.deepcopy(model.state_dict())
    dense = float(updates.traffic.totals.bytes_dense)
    ratio = float(updates.traffic.totals.compression_ratio or 0.0)
    updates.close()
    return model.state_dict(), own, ratio, dense


@pytest.mark.parametrize("kind", [SparseAdam, Adagrad])
@pytest.mark.parametrize("has_closure", [False, True])
def test_training_is_that_on_the_mean_gradient(
    ranks: Any, kind: type[Optimizer], has_closure: bool
) -> None:
    """Oracle: one process that adds up both ranks' gradients. The rows of the ranks are the same
    bits.
    """
    expected = dense_training(kind)["bags.weight"]
    (one, own, _, _), (other, _, _, _) = ranks(RANKS).run(train, kind, has_closure, EXACT)
    torch.testing.assert_close(one["bags.weight"], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(one["bags.weight"], other["bags.weight"])
    assert torch.equal(one["bags.weight"], own["bags.weight"])


def test_eight_bits_an_entry_are_enough(ranks: Any) -> None:
    """Oracle: the same in fp32, and the bytes of torch's indices and rows."""
    expected = dense_training(SparseAdam)["bags.weight"]
    (one, _, ratio, _), _ = ranks(RANKS).run(train, SparseAdam, False, {"density": 1.0})
    assert (one["bags.weight"] - expected).abs().max() < RATE
    assert ratio > 2.0


def test_with_local_steps_updates_of_rows_are_exchanged(ranks: Any) -> None:
    """Their ranks do not wait for each other at every step."""
    settings = {**EXACT, "local_steps": 2, "warmup_steps": 0}
    (one, *_), (other, *_) = ranks(RANKS).run(train, SparseAdam, False, settings)
    assert torch.equal(one["bags.weight"], other["bags.weight"])
    expected = dense_training(SparseAdam)["bags.weight"]
    assert (one["bags.weight"] - expected).abs().max() > 1e-3


def train_a_part(save: Path | None, load: Path | None) -> Any:
    """Twelve steps before the file, twelve after it; what each rank holds in the end."""
    model = Bags()
    optimizers = optimizers_of(model, SparseAdam)
    updates = Updates(model, optimizers, steps=STEPS, local_steps=1, density=0.2)
    steps = range(STEPS)
    file = None if load is None else load / f"{rank()}.pt"
    if file is not None:
        saved = torch.load(file, weights_only=False)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        updates.load_state_dict(saved["updates"])
        steps = range(STEPS // 2, STEPS)
    for step in steps:
        model.zero_grad()
        model.loss(step, rank()).backward()
        for optimizer in optimizers:
            optimizer.step()
        if save is not None and step == STEPS // 2 - 1:
            with updates.shared_weights():
                shared = copy.deepcopy(model.state_dict())
            states = {
                "model": shared,
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "updates": updates.state_dict(),
            }
            save.mkdir(exist_ok=True)
            torch.save(states, save / f"{rank()}.pt")
            break
    held = updates.state_dict()
    updates.close()
    return held, model.state_dict()


def test_a_resumed_run_is_the_uninterrupted_one(ranks: Any, tmp_path: Path) -> None:
    """Oracle: the run without a break."""
    whole = ranks(RANKS).run(train_a_part, None, None)
    ranks(RANKS).run(train_a_part, tmp_path / "half", None)
    resumed = ranks(RANKS).run(train_a_part, None, tmp_path / "half")
    for one, other in zip(whole, resumed, strict=True):
        assert_same(one[1], other[1])
        assert_same(one[0]["weights"], other[0]["weights"])
        assert_same(one[0]["exchange_clocks"], other[0]["exchange_clocks"])


class Rows(Manual):
    """The same model in a LightningModule; the Trainer's steps have closures."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Bags()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.model.zero_grad()
        loss = self.model.loss(batch_idx, rank())
        self.manual_backward(loss)
        for optimizer in self.stepped(batch_idx):
            optimizer.step()
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> list[Optimizer]:
        return optimizers_of(self.model, SparseAdam)


class RowsAlone(Rows):
    """Automatic optimization: the closure of the only optimizer's step runs backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True
        self.model.top.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model.loss(batch_idx, 0 if batch_idx % 3 == 0 else rank())

    def configure_optimizers(self) -> list[Optimizer]:
        return optimizers_of(self.model, SparseAdam)[:1]


def train_by_trainer(kind: type[Rows]) -> dict[str, Tensor]:
    model = kind()
    fit(DCTStrategy(**EXACT), model, STEPS)
    return {name: one.detach().clone() for name, one in model.model.state_dict().items()}


def train_rows_alone() -> dict[str, Tensor]:
    """In one process."""
    model = Bags()
    optimizer = SparseAdam(model.bags.parameters(), lr=RATE)
    for step in range(STEPS):
        own = [0, 0 if step % 3 == 0 else 1]
        sum(model.loss(step, of_rank) / RANKS for of_rank in own).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("kind", [Rows, RowsAlone])
def test_the_trainer_averages_them_too(ranks: Any, kind: type[Rows]) -> None:
    """Oracle: one process."""
    one, other = ranks(RANKS).run(train_by_trainer, kind)
    expected = dense_training(SparseAdam) if kind is Rows else train_rows_alone()
    torch.testing.assert_close(one["bags.weight"], expected["bags.weight"], rtol=1e-4, atol=1e-5)
    assert torch.equal(one["bags.weight"], other["bags.weight"])


def train_clipped() -> tuple[float, float, float]:
    """The norms of the mean gradient in the last steps, as clipping estimates them and as they are;
    and those of this rank's own.
    """
    model = Bags()
    optimizers = optimizers_of(model, SparseAdam)
    updates = Updates(model, optimizers, steps=STEPS, **EXACT)
    estimated = 0.0
    true = 0.0
    own = 0.0
    for step in range(STEPS):
        model.zero_grad()
        model.loss(3 * step + 1, rank()).backward()
        mine = torch.cat([one.grad.to_dense().flatten() for one in model.parameters()])  # type: ignore[union-attr]
        mean = mine / RANKS
        dist.all_reduce(mean)
        norm = updates.clip_grad_norm_(1e9)
        if step >= STEPS // 2:
            estimated += float(norm)
            true += float(mean.norm())
            own += float(mine.norm())
        for optimizer in optimizers:
            optimizer.step()
    updates.close()
    return estimated, true, own


def test_clipping_knows_how_far_they_agree(ranks: Any) -> None:
    """Oracle: the norms of the mean gradient, from which a rank's own differ more."""
    found = ranks(RANKS).run(train_clipped)
    estimated, true, own = (sum(numbers) / RANKS for numbers in zip(*found, strict=True))
    assert abs(estimated - true) < 0.5 * abs(own - true)


class Deaf(SparseAdam):
    """Leaves its closure to others."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


def step_without_closure() -> str:
    model = Bags()
    rows, top = optimizers_of(model, Deaf)
    updates = Updates(model, [rows, top], steps=STEPS, **EXACT)
    model.loss(1, rank()).backward()
    try:
        rows.step(lambda: None)  # type: ignore[call-arg]
    except RuntimeError as error:
        dist.barrier()
        return str(error)
    finally:
        updates._entrance.stop()
    return ""


def test_a_step_without_the_mean_is_refused(ranks: Any) -> None:
    """It would leave each rank with rows of its own."""
    for message in ranks(RANKS).run(step_without_closure):
        assert "'bags.weight'" in message
        assert "sparse=False" in message


def test_only_sparse_embeddings_are_chosen() -> None:
    """One with `max_norm` changes on each rank by what this looks up."""
    bounded = nn.Embedding(3, 2, sparse=True, max_norm=1.0)
    plain = nn.Embedding(3, 2, sparse=True)
    model = nn.ModuleList([nn.Embedding(3, 2), bounded, plain, nn.Linear(2, 2)])
    assert weights_of_rows(model) == {plain.weight}


@given(st.data(), st.sampled_from(["fp32", "bf16", "int8"]))
@examples(60)
def test_rows_arrive_as_they_were_sent(data: st.DataObject, row_format: str) -> None:
    num_rows = data.draw(st.integers(1, 60))
    width = data.draw(st.integers(1, 7))
    capacity = data.draw(st.integers(1, num_rows))
    chosen = data.draw(st.lists(st.integers(0, num_rows - 1), unique=True, max_size=capacity))
    places = torch.tensor(sorted(chosen), dtype=torch.int64)
    drawn = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    values = torch.randn(len(places), width, generator=drawn)
    code = RowCode(num_rows, width, capacity, row_format)
    message = code.encode(places, values)
    assert message.numel() == code.num_bytes
    found, arrived = code.decode(message, len(places))
    assert torch.equal(found, places)
    off = {"fp32": 0.0, "bf16": 2**-8, "int8": 1 / 127}[row_format]
    largest = values.abs().amax(1, keepdim=True) if len(places) else values
    assert ((arrived - values).abs() <= off * largest).all()
