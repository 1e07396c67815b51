"""The methods of others on real ranks, against their equations computed plainly; those whose
package is there.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from distributed.harness import Ranks
from distributed.training import trainer_for
from rivals.apart import ApartStrategy, Method
from rivals.sparse_loco import SparseLoCo, largest_of_chunks, pack, quantise, unpack

RANKS = 2
STEPS = 8
RATE = 0.1


class Regression(LightningModule):
    """A network of two parts, trained by SGD on rows that differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 1), nn.Tanh())

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        return (self.network(batch) - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def rows_of(rank: int) -> Tensor:
    return torch.randn(STEPS, 4, 12, generator=torch.Generator().manual_seed(rank))


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def train(make: str, settings: dict[str, Any]) -> dict[str, Any]:
    """On every rank: the weights after all steps, and what was counted."""
    module_name, class_name = make.rsplit(".", 1)
    method: Method = getattr(__import__(module_name, fromlist=[class_name]), class_name)(**settings)
    strategy = ApartStrategy(method)
    module = Regression()
    trainer_for(strategy).fit(module, DataLoader(rows_of(dist.get_rank()), batch_size=None))
    return {
        "weights": flat(module),
        "totals": strategy.traffic.totals,
        "theirs": strategy.their_ratio,
    }


def local_steps(exchange: Callable[[list[Regression], int], None]) -> Tensor:
    """The same steps with all replicas in one process; ``exchange`` brings them together after
    each.
    """
    replicas = [Regression() for _ in range(RANKS)]
    for step in range(STEPS):
        for rank, replica in enumerate(replicas):
            replica.zero_grad()
            replica.training_step(rows_of(rank)[step], step).backward()
            with torch.no_grad():
                for parameter in replica.parameters():
                    parameter -= RATE * parameter.grad
        with torch.no_grad():
            exchange(replicas, step + 1)
    return torch.stack([flat(replica) for replica in replicas]).mean(dim=0)


def write(replica: nn.Module, weights: Tensor) -> None:
    nn.utils.vector_to_parameters(weights.clone(), replica.parameters())


def test_local_sgd_is_the_mean_of_weights(ranks: Callable[[int], Ranks]) -> None:
    pytest.importorskip("torchft")

    def exchange(replicas: list[Regression], step: int) -> None:
        if step % 3 == 0:
            mean = torch.stack([flat(replica) for replica in replicas]).mean(dim=0)
            for replica in replicas:
                write(replica, mean)

    first, second = ranks(RANKS).run(
        train, "rivals.with_torchft.TorchftLocalSGD", {"sync_every": 3}
    )
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)
    torch.testing.assert_close(first["weights"], local_steps(exchange), rtol=1e-5, atol=1e-6)
    # Two exchanges in eight steps.
    assert first["totals"].compression_ratio == pytest.approx(4)
    assert first["theirs"] == 3


@pytest.mark.parametrize("fragments", [1, 2])
def test_diloco_steps_on_what_was_moved(ranks: Callable[[int], Ranks], fragments: int) -> None:
    """Oracle: p = shared - mean; v = 0.9 v + p; shared -= 0.7 (p + 0.9 v), a fragment after the
    other.
    """
    pytest.importorskip("torchft")
    sync_every = 4
    start = flat(Regression())
    edge = 12 * 20 + 20
    parts = [slice(0, edge), slice(edge, None)] if fragments == 2 else [slice(0, None)]
    state = {
        number: (start[part].clone(), torch.zeros_like(start[part]))
        for number, part in enumerate(parts)
    }
    turns = 0

    def exchange(replicas: list[Regression], step: int) -> None:
        nonlocal turns
        if step % (sync_every // fragments) == 0:
            number = turns % fragments
            turns += 1
            shared, speed = state[number]
            weights = torch.stack([flat(replica) for replica in replicas])
            moved = shared - weights[:, parts[number]].mean(dim=0)
            speed.mul_(0.9).add_(moved)
            shared -= 0.7 * (moved + 0.9 * speed)
            for replica, own in zip(replicas, weights, strict=True):
                own[parts[number]] = shared
                write(replica, own)

    settings = {"sync_every": sync_every, "fragments": fragments}
    first, second = ranks(RANKS).run(train, "rivals.with_torchft.TorchftDiLoCo", settings)
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)
    torch.testing.assert_close(first["weights"], local_steps(exchange), rtol=1e-4, atol=1e-5)
    assert first["totals"].compression_ratio == pytest.approx(sync_every, rel=0.1)


def test_sparse_loco_follows_its_equations(ranks: Callable[[int], Ranks]) -> None:
    """Oracle: the five lines of its docstring, dense, tensor by tensor."""
    every = 2
    top_k = 5
    chunk = 64
    decay = 0.9
    rate = 0.8
    shared = [parameter.detach().clone() for parameter in Regression().parameters()]
    errors = [[torch.zeros_like(tensor) for tensor in shared] for _ in range(RANKS)]

    def exchange(replicas: list[Regression], step: int) -> None:
        if step % every:
            return
        steps = [torch.zeros_like(tensor) for tensor in shared]
        for replica, own in zip(replicas, errors, strict=True):
            for parameter, tensor, error, total in zip(
                replica.parameters(), shared, own, steps, strict=True
            ):
                error.mul_(decay).add_(tensor - parameter)
                entries = error.view(-1)
                chosen = [
                    start + place
                    for start in range(0, entries.numel(), chunk)
                    for place in entries[start : start + chunk]
                    .abs()
                    .argsort(descending=True)[:top_k]
                    .tolist()
                ]
                middle = entries[chosen].abs().mean()
                sent = torch.zeros_like(entries)
                for sign in (-1, 1):
                    for is_large in (False, True):
                        same = [
                            place
                            for place in chosen
                            if (entries[place] > 0) == (sign > 0)
                            and (entries[place].abs() > middle) == is_large
                        ]
                        if same:
                            sent[same] = entries[same].mean()
                entries -= sent
                total.view(-1).add_(sent)
        for tensor, total in zip(shared, steps, strict=True):
            tensor -= rate * total / RANKS
        for replica in replicas:
            for parameter, tensor in zip(replica.parameters(), shared, strict=True):
                parameter.copy_(tensor)

    settings = {
        "sync_every": every,
        "top_k": top_k,
        "chunk": chunk,
        "decay": decay,
        "outer_learning_rate": rate,
    }
    first, second = ranks(RANKS).run(train, "rivals.sparse_loco.SparseLoCo", settings)
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)
    torch.testing.assert_close(first["weights"], local_steps(exchange), rtol=1e-4, atol=1e-5)
    # 240, 20, 20 and 1 entries: four chunks, two of five each and one of one; six bits a place and
    # two a value.
    entries = 4 * 5 + 5 + 5 + 1
    payload = 4 * 4 * 4 + entries
    assert first["totals"].bytes_sent == STEPS // every * payload
    assert first["theirs"] == pytest.approx(4 * 281 / payload)


def test_a_payload_comes_back_as_it_was() -> None:
    tensors = [torch.randn(70, 3), torch.randn(5)]
    parts = []
    for tensor in tensors:
        places = largest_of_chunks(tensor, 64, 9)
        parts.append((places, *quantise(tensor.view(-1)[places])))
    payload = pack(parts, 64)
    found = unpack(payload, tensors, [places.numel() for places, _, _ in parts], 64, 9)
    for (places, codes, levels), (again, values) in zip(parts, found, strict=True):
        assert torch.equal(places, again)
        assert torch.equal(levels[codes], values)


def test_demo_takes_the_place_of_the_optimizer(ranks: Callable[[int], Ranks]) -> None:
    """Its steps are signs: every weight moves by the rate, or not at all."""
    pytest.importorskip("pytorch_optimizer")
    pytest.importorskip("einops")
    settings = {"learning_rate": 1e-3, "top_k": 2, "chunk": 4}
    first, second = ranks(RANKS).run(train, "rivals.demo.DeMo", settings)
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)
    moved = (first["weights"] - flat(Regression())) / settings["learning_rate"]
    torch.testing.assert_close(moved, moved.round(), rtol=0, atol=2e-3)
    assert 0 < moved.abs().max().round() <= STEPS
    assert first["totals"].bytes_sent > 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"sync_every": 0}, "sync_every"), ({"top_k": 5000}, "top_k"), ({"top_k": 0}, "top_k")],
)
def test_bad_settings_are_named(settings: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=rf"strategy\.method\.{named}="):
        SparseLoCo(**settings)
