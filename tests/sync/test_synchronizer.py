import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from differences import assert_same
from emulated_ranks import EmulatedDist, EmulatedRanks, harm, heavy_tailed
from lightning_dct.compress.bucket_plan import plan_bucket
from lightning_dct.wire.payload import Unpacked, unpack_payload
from lightning_dct.wire.positions import PayloadError
from strategies_for_hypothesis import FORMATS, examples

SIZES = {"a": 300, "b": 50, "c": 200}
BUCKETS = [[["c", "b", "a"]], [["c"], ["b", "a"]], [["a", "c"], ["b"]]]
Gradients = list[dict[str, Tensor]]
gradients = partial(heavy_tailed, sizes=SIZES)


def sent(ranks: EmulatedRanks, names: list[str]) -> list[Unpacked]:
    """What each rank's payload of the last step says, which has one bucket."""
    config = ranks.synchronizers[0].config
    plan = plan_bucket(
        names,
        [ranks.sizes[name] for name in names],
        [config.density_of(name) for name in names],
        torch.float32,
        config.value_format,
        config.min_tensor_size,
        ranks.world_size,
    )
    return [unpack_payload(plan.layout, payload) for payload in ranks.payloads()]


def dense(ranks: EmulatedRanks) -> list[Tensor]:
    """What each rank sent of the only tensor in the last step."""
    return [
        torch.zeros(ranks.sizes["a"]).index_copy_(0, one.positions, one.values)
        for one in sent(ranks, ["a"])
    ]


# Conservation


@given(data=st.data(), value_format=st.sampled_from(["fp32", "bf16"]))
@examples(30)
def test_conservation_whatever_the_numbers(data: st.DataObject, value_format: str) -> None:
    numbers = st.floats(-(2.0**90), 2.0**90, width=32) | st.sampled_from([0.0, 1.0, -1.0, 1e-40])
    ranks = EmulatedRanks({"a": 40}, density=0.1, value_format=value_format)
    for _ in range(3):
        before = ranks.residuals()
        local = [
            {"a": torch.tensor(data.draw(st.lists(numbers, min_size=40, max_size=40)))}
            for _ in range(2)
        ]
        ranks.step(local)
        for rank, (went, after) in enumerate(zip(dense(ranks), ranks.residuals(), strict=True)):
            assert torch.equal(went + after["a"], local[rank]["a"] + before[rank]["a"])


# Which entries go


def test_nothing_above_the_threshold_is_a_step_like_any_other() -> None:
    ranks = EmulatedRanks({"a": 300}, density=0.02, adapt_threshold=False)
    ranks.step([{"a": rank["a"] * 1e6} for rank in gradients(0)])
    for synchronizer in ranks.synchronizers:
        synchronizer.residuals.flat(["a"], [300], torch.float32, torch.device("cpu")).zero_()
    local = gradients(1)
    mean = ranks.step(local)[0]["a"]
    assert not mean.any()
    assert torch.equal(ranks.residuals()[1]["a"], local[1]["a"])


# Thresholds


def test_the_guard_outlives_200_steps_of_nothing() -> None:
    """Zero gradients empty the residual and lower the threshold; what comes after them is sent, and
    nothing is lost.
    """
    ranks = EmulatedRanks({"a": 2000}, density=0.05, value_format="fp32")
    nothing = [{"a": torch.zeros(2000)} for _ in range(2)]
    ranks.step(gradients(0, sizes={"a": 2000}))
    for _ in range(200):
        ranks.step(nothing)
    (threshold,) = ranks.synchronizers[0].thresholds.by_label().values()
    assert 0 < threshold < float("inf")
    assert sent(ranks, ["a"])[0].positions.numel() == 0
    local = gradients(1, sizes={"a": 2000})
    before = ranks.held_back()["a"]
    (mean, _) = (one["a"].double() for one in ranks.step(local))
    assert sent(ranks, ["a"])[0].positions.numel() == 100
    due = before + sum(rank["a"].double() for rank in local)
    torch.testing.assert_close(2 * mean + ranks.held_back()["a"], due, rtol=1e-6, atol=1e-6)


# Mixed precision


@pytest.mark.parametrize("value_format", FORMATS)
def test_scaled_gradients_train_as_unscaled_ones(value_format: str) -> None:
    scale = 2.0**10
    settings: dict[str, Any] = {
        "density": 0.05,
        "value_format": value_format,
        "min_tensor_size": 60,
    }
    plain = EmulatedRanks(SIZES, **settings)
    scaled = EmulatedRanks(SIZES, loss_scale=lambda: scale, **settings)
    for step in range(4):
        local = gradients(step)
        means = plain.step(local, BUCKETS[1])
        scaled_means = scaled.step(
            [{name: g * scale for name, g in rank.items()} for rank in local], BUCKETS[1]
        )
        for mean, scaled_mean in zip(means, scaled_means, strict=True):
            assert_same({name: g * scale for name, g in mean.items()}, scaled_mean)
        assert_same(plain.residuals(), scaled.residuals())
        assert_same(
            *[[s.thresholds.state_dict() for s in ranks.synchronizers] for ranks in (plain, scaled)]
        )


def test_fp16_means_that_overflow_are_undone_on_every_rank() -> None:
    """Each rank's share fits fp16, their mean with the residuals does not."""
    ranks = EmulatedRanks(
        {"a": 300}, density=0.01, value_format="fp32", adapt_threshold=False, loss_scale=lambda: 1.0
    )
    large = torch.zeros(300, dtype=torch.float16)
    large[:3] = 60000.0
    ranks.step([{"a": large}] * 2)
    later = torch.zeros(300, dtype=torch.float16)
    later[3] = 40000.0  # below the threshold: waits
    ranks.step([{"a": later}] * 2)
    before = ranks.residuals()
    assert before[0]["a"][3] == 40000.0
    means = ranks.step([{"a": later}] * 2)
    assert all(mean["a"][3] == math.inf for mean in means)
    assert_same(ranks.residuals(), before)


# Parameters without a gradient


def test_without_defer_unused_residuals_go_out_on_their_own() -> None:
    ranks = EmulatedRanks({"a": 300}, density=0.1)
    ranks.step(gradients(0))
    ranks.request_refresh()
    assert ranks.step([{"a": torch.zeros(300)}] * 2)[0]["a"].any()


# Buckets that are sent dense


@pytest.mark.parametrize("settings", [{"density": 1.0}, {"min_tensor_size": 1000}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_buckets_are_averaged_as_ddp_does(
    settings: dict[str, Any], dtype: torch.dtype
) -> None:
    ranks = EmulatedRanks(SIZES, world_size=3, **settings)
    local = gradients(0, world_size=3, dtype=dtype)
    means = ranks.step(local, BUCKETS[1])
    for name in SIZES:
        expected = local[0][name] / 3 + local[1][name] / 3 + local[2][name] / 3
        assert all(torch.equal(mean[name], expected) for mean in means)
    assert ranks.synchronizers[0].norm() == 0.0
    assert ranks.synchronizers[0].traffic.totals.compression_ratio == pytest.approx(
        4 / dtype.itemsize, rel=1e-2
    )
    assert ranks.synchronizers[0].traffic.totals.density == 1.0


def test_sparse_gradients_under_nccl_are_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(EmulatedDist, "get_backend", lambda group: "cpu:gloo,cuda:nccl")
    sparse = torch.sparse_coo_tensor([[1]], torch.ones(1, 4), (10, 4), check_invariants=True)
    with pytest.raises(
        ValueError, match=r"NCCL cannot average sparse gradients.*Use `compress='updates'`"
    ):
        EmulatedRanks({"rows": 40}).step([{"rows": sparse}, {"rows": sparse}])


def test_sparse_gradients_go_uncompressed() -> None:
    ranks = EmulatedRanks({"table": 40, "a": 300}, density=0.1)

    def table(rows: list[int]) -> Tensor:
        return torch.sparse_coo_tensor(
            [rows], torch.ones(len(rows), 4), (10, 4), check_invariants=True
        )

    local = [
        {"table": table(rows), **rank}
        for rows, rank in zip([[1, 2], [2, 7]], gradients(0), strict=True)
    ]
    means = ranks.step(local, [["table"], ["a"]])
    expected = torch.zeros(10, 4)
    expected[[1, 7]] = 0.5
    expected[2] = 1.0
    assert torch.equal(means[1]["table"].to_dense(), expected)
    assert means[0]["a"].any()


# Counting


def test_bytes_and_entries_are_counted_where_they_leave() -> None:
    ranks = EmulatedRanks(SIZES, world_size=3, density=0.05, min_tensor_size=60)
    ranks.step(gradients(0, world_size=3), [["c"], ["b", "a"]])
    totals = ranks.synchronizers[2].traffic.totals
    assert totals.bytes_sent == 2 * sum(ranks.payloads(bucket)[2].numel() for bucket in (0, 1))
    assert totals.bytes_dense == sum(-(-4 * size * 2 * 2 // 3) for size in (200, 350))
    assert totals.entries == 550
    assert totals.entries_sent == 10 + 15 + 50
    assert totals.seconds > 0


# State


def test_state_of_another_model_is_refused_and_changes_nothing() -> None:
    saved = EmulatedRanks(SIZES)
    other = EmulatedRanks({**SIZES, "c": 201})
    saved.step(gradients(0))
    before = other.state_dicts()[0]
    with pytest.raises(
        ValueError,
        match=r"residual of parameter 'c' has 200 entries, the model's\s+parameter has 201",
    ):
        other.synchronizers[0].load_state_dict(saved.state_dicts()[0])
    assert other.state_dicts()[0] == before


# Errors


def test_a_harmed_payload_names_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    harm(monkeypatch, ranks := EmulatedRanks({"a": 300}), 0)
    with pytest.raises(
        PayloadError,
        match="Gradients from rank 1 of the process group: the payload begins with 0x0",
    ):
        ranks.step(gradients(0))
