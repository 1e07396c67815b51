"""The exchanges against what they must keep, on ranks emulated in one process."""

import math
import random
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from differences import assert_same
from emulated_ranks import EmulatedRanks, harm, heavy_tailed
from lightning_dct import reference
from lightning_dct.checkpoint.reading import merge_states
from lightning_dct.wire.positions import PayloadError
from strategies_for_hypothesis import FORMATS, examples

# a is cut for up to four owners at 20% density, c for two; b is sent dense and d is too small to be
# cut.
SIZES = {"a": 1400, "b": 50, "c": 700, "d": 120}
BUCKETS = [[["d", "c", "b", "a"]], [["c"], ["b", "a"], ["d"]], [["a", "d", "c"], ["b"]]]
SETTINGS: dict[str, Any] = {"density": 0.2, "min_tensor_size": 60}
# Ranks, exchange, ranks per node.
EXCHANGES = [(2, "all_gather", 1), (3, "two_phase", 1), (4, "two_phase", 1), (6, "hierarchical", 2)]
EVERY_EXCHANGE = pytest.mark.parametrize(("world_size", "exchange", "ranks_per_node"), EXCHANGES)
Gradients = list[dict[str, Tensor]]
gradients = partial(heavy_tailed, sizes=SIZES)


def ranks_of(world_size: int, exchange: str, ranks_per_node: int, **settings: Any) -> EmulatedRanks:
    return EmulatedRanks(SIZES, world_size, exchange, ranks_per_node, **{**SETTINGS, **settings})


def total(local: Gradients) -> dict[str, Tensor]:
    return {name: torch.stack([rank[name].double() for rank in local]).sum(dim=0) for name in SIZES}


def compressed(mean: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without b, which is all-reduced where it has a bucket of its own, and rounded at another
    place then.
    """
    return {name: mean[name] for name in ("a", "c", "d")}


@given(form=st.sampled_from(FORMATS), adapt_threshold=st.booleans(), seed=st.integers(0, 2**32))
@EVERY_EXCHANGE
@examples(15)
def test_equals_the_reference(
    world_size: int, exchange: str, ranks_per_node: int, form: str, adapt_threshold: bool, seed: int
) -> None:
    """Oracle: lightning_dct.reference, every bit of means over four steps, the last with new
    thresholds.
    """
    choice = random.Random(seed)
    noise = torch.Generator().manual_seed(seed)
    settings: dict[str, Any] = {
        "density": choice.uniform(0.02, 0.4),
        "value_format": form,
        "adapt_threshold": adapt_threshold,
    }
    settings["min_tensor_size"] = choice.choice([0, 60, 400])
    # The first is compressed, so all travel in one payload.
    sizes = {
        "a": choice.randint(900, 3000),
        "b": choice.choice([1, 50, 300]),
        "c": choice.choice([120, 700]),
    }
    ranks = EmulatedRanks(sizes, world_size, exchange, ranks_per_node, **settings)
    all_states = {}
    for step in range(4):
        local = [
            {name: torch.randn(n, generator=noise).pow(3) for name, n in sizes.items()}
            for _ in range(world_size)
        ]
        if step == 3:
            ranks.request_refresh()
            for held in (held for states in all_states.values() for held in states.values()):
                held.target = 0
        means = ranks.step(local)
        for name in sizes:
            states = all_states.setdefault(name, reference.States(reference.State))
            plain = reference.Settings(exchange=exchange, ranks_per_node=ranks_per_node, **settings)
            expected, *_ = reference.exchange([rank[name] for rank in local], states, plain)
            assert all(torch.equal(mean[name], expected) for mean in means)


@EVERY_EXCHANGE
def test_half_precision(world_size: int, exchange: str, ranks_per_node: int) -> None:
    dtype = torch.bfloat16
    ranks = ranks_of(world_size, exchange, ranks_per_node)
    due = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
    done = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
    for step in range(4):
        local = gradients(step, world_size, dtype)
        means = ranks.step(local, BUCKETS[1])
        for name in SIZES:
            assert means[0][name].dtype == dtype
            assert all(torch.equal(mean[name], means[0][name]) for mean in means)
            due[name] += total(local)[name]
            done[name] += world_size * means[0][name].double()
    held = ranks.held_back()
    for name in SIZES:
        # Sums inside a node and the means are rounded to the gradients' dtype, as under DDP.
        torch.testing.assert_close(
            done[name] + held[name], due[name], rtol=0.05, atol=0.05 * float(due[name].max())
        )


@EVERY_EXCHANGE
def test_buckets_do_not_matter(world_size: int, exchange: str, ranks_per_node: int) -> None:
    """DistributedDataParallel lays its buckets out anew after the first step, and after every
    start.
    """
    one, other = (
        ranks_of(world_size, exchange, ranks_per_node, value_format="2bit") for _ in range(2)
    )
    for step in range(4):
        means = [
            ranks.step(gradients(step, world_size), BUCKETS[which])
            for ranks, which in ((one, 0), (other, step % 3))
        ]
        assert_same(*[compressed(mean) for (mean, *_) in means])
    for mine, theirs in zip(one.state_dicts(), other.state_dicts(), strict=True):
        for key in ("thresholds", "residuals", "owned"):
            assert_same(mine[key], theirs[key])


@EVERY_EXCHANGE
def test_a_resumed_run_continues_bit_for_bit(
    world_size: int, exchange: str, ranks_per_node: int
) -> None:
    unbroken, resumed = (
        ranks_of(world_size, exchange, ranks_per_node, value_format="1bit") for _ in range(2)
    )
    for step in range(3):
        unbroken.step(gradients(step, world_size), BUCKETS[step])
    for synchronizer, state in zip(resumed.synchronizers, unbroken.state_dicts(), strict=True):
        synchronizer.load_state_dict(state)
    for step in range(3, 6):
        local = gradients(step, world_size)
        means = unbroken.step(local, BUCKETS[2])[1], resumed.step(local, BUCKETS[0])[1]
        assert_same(*map(compressed, means))


@pytest.mark.parametrize("new", [(1, "all_gather", 1), (3, "all_gather", 1), *EXCHANGES[2:]])
@pytest.mark.parametrize("old", [(2, "all_gather", 1), (4, "two_phase", 1), (4, "hierarchical", 2)])
def test_what_is_held_back_survives_another_exchange_and_another_number_of_ranks(
    old: tuple[int, str, int], new: tuple[int, str, int]
) -> None:
    """It is conserved as a mean over the ranks, and goes out with later steps."""
    before = ranks_of(*old)
    for step in range(3):
        before.step(gradients(step, old[0]), BUCKETS[step])
    states = before.state_dicts()
    after = ranks_of(*new, density=1.0) if new[0] == 1 else ranks_of(*new)
    for rank, synchronizer in enumerate(after.synchronizers):
        synchronizer.load_state_dict(merge_states([states[rank]] if new[0] == old[0] else states))
    for name, held in before.held_back().items():
        torch.testing.assert_close(
            after.held_back()[name] / new[0], held / old[0], rtol=1e-6, atol=1e-6
        )
    held = after.held_back()
    for step in range(2):
        local = gradients(step, new[0])
        mean = after.step(local, BUCKETS[2])[0]
        due = total(local)
        now = after.held_back()
        for name in SIZES:
            sent = new[0] * mean[name].double()
            torch.testing.assert_close(
                sent + now[name], due[name] + held[name], rtol=1e-5, atol=1e-4
            )
        held = now
    if new[1] == "hierarchical":
        assert not any(residual.any() for rank in after.residuals() for residual in rank.values())


@EVERY_EXCHANGE
def test_what_is_held_back_goes_out_at_density_one(
    world_size: int, exchange: str, ranks_per_node: int
) -> None:
    before, after = (ranks_of(world_size, exchange, ranks_per_node, density=d) for d in (0.2, 1.0))
    before.step(gradients(0, world_size))
    for synchronizer, state in zip(after.synchronizers, before.state_dicts(), strict=True):
        synchronizer.load_state_dict(state)
    local = gradients(1, world_size)
    mean = after.step(local, BUCKETS[1])[0]
    for name in SIZES:
        due = total(local)[name] + before.held_back()[name]
        torch.testing.assert_close(world_size * mean[name].double(), due, rtol=1e-4, atol=1e-4)
        assert not after.held_back()[name].any()


@pytest.mark.parametrize(("broken", "name"), [(math.nan, "a"), (math.inf, "b"), (math.inf, "d")])
@EVERY_EXCHANGE
def test_nonfinite_gradients_arrive_and_are_not_held_back(
    world_size: int, exchange: str, ranks_per_node: int, name: str, broken: float
) -> None:
    ranks = ranks_of(world_size, exchange, ranks_per_node)
    ranks.step(gradients(0, world_size), BUCKETS[0])
    local = gradients(1, world_size)
    local[1][name][17] = broken
    for mean in ranks.step(local, BUCKETS[0]):
        assert not mean[name][17].isfinite()
        assert all(bool(mean[other].isfinite().all()) for other in SIZES if other != name)
    assert all(bool(held.isfinite().all()) for held in ranks.held_back().values())
    mean = ranks.step(gradients(2, world_size), BUCKETS[0])[0]
    assert all(bool(values.isfinite().all()) for values in mean.values())


@pytest.mark.parametrize("name", ["a", "b"])
@EVERY_EXCHANGE
def test_a_step_the_scaler_skips_is_undone(
    world_size: int, exchange: str, ranks_per_node: int, name: str
) -> None:
    ranks = ranks_of(world_size, exchange, ranks_per_node, loss_scale=lambda: 8.0)
    for step in range(2):
        ranks.step(gradients(step, world_size), BUCKETS[2])
    before = ranks.state_dicts()
    local = gradients(2, world_size)
    local[0][name][3] = math.inf
    ranks.request_refresh()
    ranks.step(local, BUCKETS[2])
    for old, new in zip(before, ranks.state_dicts(), strict=True):
        for key in ("synchronisations", "steps_since_refresh", "thresholds", "residuals", "owned"):
            assert_same(old[key], new[key])
    ranks.step(gradients(3, world_size), BUCKETS[2])
    assert [synchronizer.steps_since_refresh for synchronizer in ranks.synchronizers] == [
        1
    ] * world_size


def test_leaving_another_exchange_is_undone_too() -> None:
    """The first step after a change sends residuals out densely; skipped, it leaves them where they
    were.
    """
    before = ranks_of(4, "all_gather", 1)
    after = ranks_of(4, "hierarchical", 2, loss_scale=lambda: 4.0)
    before.step(gradients(0, 4))
    for synchronizer, state in zip(after.synchronizers, before.state_dicts(), strict=True):
        synchronizer.load_state_dict(state)
    local = gradients(1, 4)
    local[3]["a"][0] = math.nan
    after.step(local)
    for old, new in zip(before.state_dicts(), after.state_dicts(), strict=True):
        assert_same(old["residuals"], new["residuals"])
    assert not any(
        bool(piece.any())
        for s in after.state_dicts()
        for p in s["owned"].values()
        for piece in p.values()
    )
    local = gradients(1, 4)
    mean = after.step([{n: 4.0 * g for n, g in rank.items()} for rank in local])[0]
    held = after.held_back()
    for name in SIZES:
        due = total(local)[name] + before.held_back()[name]
        torch.testing.assert_close(mean[name].double() + held[name], due, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["a", "b"])
@EVERY_EXCHANGE
def test_what_is_held_back_of_an_unused_parameter_waits(
    world_size: int, exchange: str, ranks_per_node: int, name: str
) -> None:
    """DistributedDataParallel throws away what is sent for it, so neither ranks nor owners may send
    any.
    """
    ranks = ranks_of(world_size, exchange, ranks_per_node, defer_unused=True)
    for step in range(2):
        ranks.step(gradients(step, world_size))
    before = ranks.held_back()
    local = gradients(2, world_size)
    for rank in local:
        rank[name].zero_()
    means = ranks.step(local)
    assert not means[0][name].any()
    assert torch.equal(ranks.held_back()[name], before[name])
    assert means[0]["c"].any()
    local[0][name].fill_(100.0)  # one rank uses it again: what all hold back may move
    assert ranks.step(local)[0][name].any()


def test_bytes_between_nodes_and_inside() -> None:
    ranks = ranks_of(6, "hierarchical", 2)
    ranks.step(gradients(0, 6), BUCKETS[2])
    for synchronizer in ranks.synchronizers:
        totals = synchronizer.traffic.totals
        # A ring in the order of the nodes: 2 * 5 / 6 of the bytes a rank, every other of which
        # stays inside a node.
        assert abs(totals.bytes_dense - 4 * sum(SIZES.values()) * 2 * 5 / 6 / 2) < 3
        # Inside: an all-reduce between two ranks, and the payloads of three nodes to one neighbour.
        assert (
            totals.bytes_inside_node
            >= 4 * (sum(SIZES.values()) - SIZES["b"]) + 3 * totals.bytes_sent / 2 * 0.8
        )
    sent = [synchronizer.traffic.totals.bytes_sent for synchronizer in ranks.synchronizers]
    assert max(sent) < 1.2 * min(sent)  # d belongs to one rank of each node


def test_a_harmed_sum_names_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    harm(
        monkeypatch,
        ranks := EmulatedRanks({"a": 1400}, 2, "two_phase", density=0.2),
        1,
        middle=True,
    )
    with pytest.raises(
        PayloadError, match="Sums from rank 1 of the process group: the payload begins with 0x0"
    ):
        ranks.step(gradients(0, 2))
