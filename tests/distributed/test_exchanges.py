"""The sharded exchange and the one by node under Lightning, on real ranks."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from distributed.test_idioms import IDIOMS, train_idiom
from distributed.training import (
    Module,
    Watch,
    assert_conserved,
    assert_learns,
    assert_replicas_equal,
    fit,
    loader,
    message_of,
    on_two_nodes,
    trainer_for,
)
from lightning_dct import DCTStrategy
from lightning_dct.exchange import collectives, compressed
from lightning_dct.sync import buffers
from one_card import DEVICE


def train_idiom_on_two_nodes(*arguments: Any) -> Any:
    with on_two_nodes():
        return train_idiom(*arguments, num_nodes=2, devices=2)


@pytest.mark.parametrize(
    ("world_size", "exchange", "name"),
    [
        *(
            (3, "two_phase", name)
            for name in (
                "many buckets",
                "several optimizers",
                "unused on ranks",
                "copied gradients, accumulation",
                "sparse embedding",
            )
        ),
        *((4, "hierarchical", name) for name in ("unused at times", "static graph, manual")),
    ],
)
def test_idiom_trains(ranks: Any, world_size: int, exchange: str, name: str) -> None:
    """Oracles: replicas equal, the loss falls, one synchronisation an optimizer step, gradients
    conserved in sum.
    """
    train = train_idiom_on_two_nodes if exchange == "hierarchical" else train_idiom
    results = ranks(world_size).run(train, name, 0.2, exchange)
    runs = [run for run, _ in results]
    assert_replicas_equal(runs)
    assert_learns(runs[0])
    assert runs[0].synchronisations == IDIOMS[name].synchronisations
    assert all(run.state["owned"] for run in runs)
    assert bool(runs[0].residuals) == (exchange == "two_phase")
    assert bool(runs[0].totals.bytes_inside_node) == (exchange == "hierarchical")
    assert_conserved([sums for _, sums in results])


def refused(settings: dict[str, Any]) -> str:
    return message_of(fit, DCTStrategy(compress="gradients", **settings), Module(), 2)


def test_by_node_on_one_node_is_refused_on_every_rank(ranks: Any) -> None:
    for message in ranks(2).run(refused, {"exchange": "hierarchical"}):
        assert "`exchange='hierarchical'` needs several nodes" in message
        assert "all ranks are on one node. Use `exchange='auto'`" in message


def refused_without_numba() -> str:
    with mock.patch("lightning_dct.kernels._numba_error", return_value=ImportError("none")):
        return refused({"kernel": "numba"})


@pytest.mark.skipif(DEVICE.type == "cuda", reason="numba is for CPUs")
def test_a_kernel_that_is_not_installed_is_refused_on_every_rank(ranks: Any) -> None:
    for message in ranks(2).run(refused_without_numba):
        assert "`kernel='numba'` needs the package numba (none)" in message


def fit_twice(settings: dict[str, Any]) -> tuple[list[str], int, int]:
    """Validation between two fits tears the strategy down as often."""
    strategy = DCTStrategy(density=0.2, **settings)
    watch = Watch()
    before = len(dist.distributed_c10d._world.pg_names)
    with on_two_nodes():
        trainer = trainer_for(strategy, callbacks=[watch], num_nodes=2, devices=2)
        trainer.fit(Module(), loader(4, 40, 8))
        trainer.test(Module(), loader(1, 40, 8), verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(Module(), loader(4, 40, 8))
    return (
        watch.hashes,
        strategy.traffic.totals.steps,
        len(dist.distributed_c10d._world.pg_names) - before,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"compress": "gradients", "exchange": "hierarchical"},
        *({"overlap_steps": 1, "exchange": e} for e in ("two_phase", "hierarchical")),
    ],
)
def test_groups_end_with_the_fit(ranks: Any, settings: dict[str, Any]) -> None:
    """Oracle: as many process groups afterwards as before, and a second fit that makes new ones."""
    results = ranks(4).run(fit_twice, settings)
    assert [(steps, left) for _, steps, left in results] == [(4, 0)] * 4
    assert all(hashes == results[0][0] for hashes, _, _ in results)
    assert len(results[0][0]) == 8


class WithStatistics(Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(3))


def groups_in_use(settings: dict[str, Any]) -> list[set[bool]]:
    """Whether exchanges, and those of buffers, are on the default group, on which Lightning
    averages logs.
    """
    used: list[set[bool]] = [set(), set()]

    def noted(collective: Any, seen: set[bool]) -> Any:
        def start(tensor: torch.Tensor, link: collectives.Link) -> Any:
            seen.add(link.group is dist.group.WORLD)
            return collective(tensor, link)

        return start

    with (
        mock.patch.object(
            compressed, "all_gather_payload", noted(collectives.all_gather_payload, used[0])
        ),
        mock.patch.object(buffers, "extremes", noted(collectives.extremes, used[1])),
    ):
        fit(
            DCTStrategy(density=0.2, min_tensor_size=0, local_steps=2, **settings),
            WithStatistics(),
            6,
        )
    return used


@pytest.mark.parametrize(("overlap_steps", "on_default"), [(1, {False}), (0, {True})])
def test_what_training_waits_for_does_not_queue_behind_updates_in_flight(
    ranks: Any, overlap_steps: int, on_default: set[bool]
) -> None:
    """Under NCCL the collectives of one group run one after the other."""
    for used in ranks(2).run(
        groups_in_use, {"overlap_steps": overlap_steps, "exchange": "all_gather"}
    ):
        assert used == [on_default, {True}]
