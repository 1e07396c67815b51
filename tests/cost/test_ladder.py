"""What may be chosen and the rule that chooses: properties, and a case by hand."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dct import DCTConfig, DCTStrategy
from lightning_dct.cost.auto import (
    ALIKE,
    Measured,
    Option,
    choose,
    dense,
    describe,
    predict_dense,
    predict_updates,
    reason,
    table_of,
)
from lightning_dct.cost.forecast import layout_of
from lightning_dct.cost.timing import MeasuredLink, Speed
from lightning_dct.cost.workload import one_tensor
from lightning_dct.exchange.factory import NodeLayout
from lightning_dct.law import BY_LENGTH, Given, steps_needed

BASE = DCTConfig()
UPDATES = Given(BASE, BY_LENGTH)
LADDER = [dense(BASE), dense(BASE, "bf16"), *UPDATES.rungs(2)]
SECONDS = st.floats(1e-6, 1e3)


def options_of(seconds: list[float]) -> list[Option]:
    needed = [0, 0, 0, *(steps_needed(config, 2) for config in LADDER[3:])]
    return [Option(config, one, 0, steps) for config, one, steps in zip(LADDER, seconds, needed, strict=False)]


@given(st.lists(SECONDS, min_size=1, max_size=len(LADDER)), SECONDS, st.integers(1, 10**6) | st.just(float("inf")))
def test_the_choice_is_the_first_that_is_short_enough_and_its_run_is_long_enough(
    seconds: list[float], longest: float, steps: float
) -> None:
    options = options_of(seconds)
    chosen = choose(options, longest, steps)
    allowed = [option for option in options if option.steps_needed <= steps]
    assert chosen in allowed
    place = allowed.index(chosen)
    if place and chosen.seconds <= longest:
        assert all(option.seconds > longest for option in allowed[:place])
    elif place:
        assert all(longest < chosen.seconds <= option.seconds for option in allowed)
    assert place == 0 or options[0].seconds > ALIKE * chosen.seconds
    told = reason(chosen, options, longest, steps)
    assert ("none is within" in told or "but exceeds" in told) == (chosen.seconds > longest)
    assert ("too short for the others" in told) == (chosen.seconds > longest and len(allowed) < len(options))


def test_plain_ddp_is_not_left_for_a_step_that_is_hardly_shorter() -> None:
    """As a run predicted it: 45.1 ms in bf16, against 47.4; the step in bf16 took 52.1."""
    assert choose(options_of([0.0474, 0.0451]), 0.0452, 1000).is_lossless
    assert choose(options_of([0.0474, 0.0451]), 0.04, 1000).is_lossless
    assert choose(options_of([0.0474, 0.0430]), 0.04, 1000).config.averages_in_bf16


@given(st.lists(SECONDS, min_size=len(LADDER), max_size=len(LADDER)), SECONDS, SECONDS)
def test_who_may_take_longer_loses_no_more(seconds: list[float], one: float, other: float) -> None:
    options, (shorter, longer) = options_of(sorted(seconds, reverse=True)), sorted([one, other])
    places = [options.index(choose(options, longest, 10**9)) for longest in (longer, shorter)]
    assert places[0] <= places[1]


def test_rungs_lose_ever_more_and_a_lower_bound_holds() -> None:
    for least in (0.0, 0.15, 0.5, 1.0):
        for ranks in (2, 4, 8):
            found = UPDATES.rungs(ranks, least)
            needed = [steps_needed(config, ranks) for config in found]
            assert needed == sorted(set(needed))
            assert min(config.density for config in found) >= least
    assert Given(DCTConfig(warmup_steps=7, exchange="sharded"), BY_LENGTH).rungs(2)[0].warmup_steps == 7
    assert dense(DCTConfig(kernel="torch", residual_decay=0.9)).kernel == "torch"


def measured(layout: NodeLayout, **link: float) -> Measured:
    return Measured(0.1, MeasuredLink(len(layout.places), **link), layout, one_tensor(1_000_000))


def test_predictions_by_hand() -> None:
    """2 hosts, 4 MB of gradients, 4 ns a byte and 10 ms for an empty all-reduce: 26 ms, and 18 in bf16."""
    run = measured(layout_of(2, 2), latency=0.01, seconds_per_byte=4e-9)
    whole, half = predict_dense(run, BASE)
    assert (whole.seconds, half.seconds) == pytest.approx((0.126, 0.118))
    assert (whole.num_bytes, half.num_bytes) == (4_000_000, 2_000_000)
    # DDP waits for 12 ms: 14 are hidden, of which bf16 needs no more.
    whole, half = predict_dense(run, BASE, (dense(BASE), 0.012))
    assert (whole.seconds, half.seconds) == pytest.approx((0.112, 0.104))
    # Other ranks are late by 34 ms, whatever is sent.
    whole, half = predict_dense(run, BASE, (dense(BASE), 0.06))
    assert (whole.seconds, half.seconds) == pytest.approx((0.16, 0.152))
    speed = Speed(compress=1e-9, clear=2e-9, add=1e-9, how="", move=5e-9)
    (every, eighth) = predict_updates(run, [UPDATES.rungs(4)[0], BASE], {0.3: speed})
    # 10 ms of work, one message's way, and 8 bits of each byte at the rate of 4 bits in 4 ns a byte and rank.
    exchange = 0.010 + 0.005 + every.num_bytes * 4e-9
    assert every.seconds == pytest.approx(0.1 + exchange)
    assert eighth.seconds == pytest.approx(0.1 + exchange / 8)
    heads, *rows = table_of([whole, every], every.config, 49)
    assert len(heads) == len(rows[0])
    assert rows[0][1] == "160.0"
    assert rows[1][-1] == "taken"
    assert table_of([eighth], UPDATES.rungs(4)[0], eighth.steps_needed - 1)[1][-1] == "this run is too short"


def test_every_rung_sends_less() -> None:
    for hosts in (2, 3, 4):
        run = measured(layout_of(hosts, hosts), latency=0.01, seconds_per_byte=1e-9)
        configs = UPDATES.rungs(hosts)
        speeds = {config.density: Speed(1e-9, 1e-10, 1e-11, "") for config in configs}
        sent = [option.num_bytes for option in predict_updates(run, configs, speeds)]
        assert sent == sorted(set(sent), reverse=True)


def test_descriptions() -> None:
    assert [describe(config) for config in LADDER[:4]] == [
        "plain DDP",
        "DDP in bf16",
        "updates every step, 30%",
        "updates every step, 20%",
    ]


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"target_overhead": 0}, ValueError, "`target_overhead` must be above 0"),
        ({"target_overhead": -0.1}, ValueError, "`target_overhead` must be above 0"),
        ({"target_overhead": True}, TypeError, "`target_overhead` must be a number"),
        ({"target_overhead": 0.1, "local_steps": 4}, ValueError, "given as local_steps=4. Leave these out"),
        ({"target_overhead": 0.1, "density": 0.4, "delay": 1}, ValueError, "given as delay=1, density=0.4"),
        ({"target_overhead": 0.1, "compress": "gradients"}, ValueError, "given as compress='gradients'"),
        ({"target_overhead": 0.1, "value_format": "2bit"}, ValueError, "given as value_format='2bit'"),
        ({"target_overhead": 0.1, "density_per_parameter": {"*": 0.1}}, ValueError, "given as density_per_parameter="),
        ({"target_overhead": 0.1, "min_density": 0.0}, ValueError, r"`min_density` .* must be in \(0, 1\]"),
        ({"min_density": 0.1}, ValueError, "`min_density` bounds what `target_overhead` chooses"),
    ],
)
def test_misuse_is_refused_by_name(settings: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        DCTStrategy(**settings)


def test_speed_of_many_tensors_is_measured_with_the_small_ones_whole() -> None:
    from lightning_dct.cost.timing import measure_speed

    speed = measure_speed(DCTConfig(density=0.2, min_tensor_size=128), [300, 10, 5000], 0.0, torch.device("cpu"))
    assert min(speed.compress, speed.move) > 0
    assert "5,310 entries" in speed.how
