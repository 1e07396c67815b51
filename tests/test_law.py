"""The law that chooses local steps and density: arithmetic by hand, and what must hold for every
run.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dct import DCTConfig
from lightning_dct.law import (
    CANDIDATES,
    COUNTED,
    ENTRIES,
    SHORTEST,
    RunSettings,
    UserSettings,
    bytes_sent,
    expected_loss,
    steps_needed,
)

RANKS = st.integers(2, 64)
STEPS = st.integers(1, 10**7)
RUNGS = st.sampled_from(
    [DCTConfig(local_steps=steps, density=density) for steps, density in CANDIDATES]
)
NOTHING = UserSettings.of({})


def test_the_loss_by_hand() -> None:
    """2 ranks, 8 steps at 30%, 1,000 steps: 2 * 0.035 / 0.3 + 0.65 * 7^0.8 = 0.2333 + 3.0833."""
    eight = DCTConfig(local_steps=8, density=0.3)
    assert expected_loss(eight, 2, 1000) == pytest.approx(3.3166, abs=0.001)
    # With three times the steps entries that wait cost a third, and steps apart a 3^0.8-th: 2.41.
    assert expected_loss(eight, 2, 3000) == pytest.approx(0.2333 / 3 + 3.0833 / 2.4082, abs=0.001)
    # Steps apart never cost less than 0.2 log2 8.
    assert expected_loss(eight, 2, 10_000) == pytest.approx(0.02333 + 0.6, abs=0.001)
    # One step apart, with a mean as long as the steps: 0.035 * 3 / 0.1 on four ranks, 4 times that
    # on 8, 8^0.45 on 64.
    assert expected_loss(DCTConfig(local_steps=1, density=0.1), 4, 1000) == pytest.approx(1.05)
    assert expected_loss(DCTConfig(local_steps=1, density=0.1), 8, 1000) == pytest.approx(4.2)
    assert expected_loss(DCTConfig(local_steps=1, density=0.1), 64, 1000) == pytest.approx(
        4.2 * 2.5491, abs=0.001
    )
    # The least, however long the run is: 0.25 on two ranks, 0.5 on four and more.
    assert [
        expected_loss(DCTConfig(local_steps=1, density=0.1), ranks, 10**6) for ranks in (2, 4, 64)
    ] == [
        0.25,
        0.5,
        0.5,
    ]
    # With `hierarchical` the mean is not lengthened, and waiting costs twice as much.
    hierarchical = DCTConfig(local_steps=1, density=0.1, exchange="hierarchical")
    assert expected_loss(hierarchical, 4, 1000) == pytest.approx(2.1)


# Percent lost against dense training, of runs of some length: docs/evidence/quality.md has them
# all.
LEVEL = (
    (2, 1, 0.1, 1000),
    (2, 1, 0.03, 3000),
    (4, 1, 0.3, 1000),
    (4, 1, 0.1, 3000),
    (4, 1, 0.03, 10_000),
)
LEVEL += ((4, 1, 0.03, 60_000), (4, 4, 0.1, 25_000), (8, 1, 0.03, 60_000))
LOSING = (
    (2, 1, 0.01, 1000),
    (2, 16, 0.1, 3000),
    (4, 4, 0.15, 1000),
    (4, 16, 0.1, 3000),
    (4, 16, 0.1, 10_000),
)
LOSING += (
    (4, 8, 0.1, 10_000),
    (8, 1, 0.3, 1000),
    (8, 1, 0.1, 1000),
    (8, 16, 0.1, 60_000),
    (2, 2, 0.1, 3000),
)
LOSING += (
    (4, 8, 0.1, 25_000),
    (4, 8, 0.3, 25_000),
    (4, 16, 0.1, 25_000),
    (8, 8, 0.3, 25_000),
    (16, 8, 0.1, 25_000),
)


@pytest.mark.parametrize("run", LEVEL + LOSING)
def test_what_has_been_level_is_allowed_and_what_has_lost_more_than_the_bound_is_not(
    run: tuple[int, int, float, int],
) -> None:
    ranks, local_steps, density, steps = run
    assert (steps_needed(DCTConfig(local_steps=local_steps, density=density), ranks) <= steps) == (
        run in LEVEL
    )


@given(RUNGS, RANKS, STEPS)
def test_a_run_loses_less_the_longer_it_is_and_more_the_more_ranks_it_has(
    config: DCTConfig, ranks: int, steps: int
) -> None:
    loss = expected_loss(config, ranks, steps)
    assert 0 < expected_loss(config, ranks, 2 * steps) <= loss
    assert expected_loss(config, ranks + 1, steps) >= loss
    needed = steps_needed(config, ranks)
    assert expected_loss(config, ranks, needed) <= 0.5
    assert needed == 1 or expected_loss(config, ranks, needed - 1) > 0.5


def test_no_run_is_long_enough_for_many_steps_apart() -> None:
    """What is given is kept; what is left out is then what loses least."""
    assert steps_needed(DCTConfig(local_steps=8, density=0.1), 2) == math.inf
    assert UserSettings.of({"local_steps": 64}).for_run(4, 10**9).density == CANDIDATES[0][1]


@given(RANKS, STEPS)
def test_the_choice_is_within_the_bound_and_nothing_with_fewer_bytes_is(
    ranks: int, steps: int
) -> None:
    rungs = NOTHING.candidates(ranks)
    place = rungs.index(NOTHING.for_run(ranks, steps))
    assert place == 0 or steps_needed(rungs[place], ranks) <= steps
    assert all(steps_needed(config, ranks) > steps for config in rungs[place + 1 :])


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
def test_nothing_is_better_than_a_rung(ranks: int) -> None:
    """Oracle: each rung needs a longer run than the one before; whatever is none needs as long a
    one for more bytes.
    """
    rungs = NOTHING.candidates(ranks)
    needed = [steps_needed(one, ranks) for one in rungs]
    assert needed == sorted(set(needed))
    assert (rungs[0].local_steps, rungs[0].density) == CANDIDATES[0]
    for config in (DCTConfig(local_steps=steps, density=density) for steps, density in CANDIDATES):
        fewer = [one for one in rungs if bytes_sent(one, ranks) <= bytes_sent(config, ranks)]
        assert any(steps_needed(one, ranks) <= steps_needed(config, ranks) for one in fewer)


def test_bytes_are_those_of_the_exchange_by_hand() -> None:
    """A ring of 64 ranks carries 63 payloads of an all-gather; 30% in bf16 would be more than the
    dense all-reduce.
    """
    many = DCTConfig(local_steps=2, density=0.3, exchange="all_gather", value_format="bf16")
    assert bytes_sent(many, 64) == 2 * 63 / 64 * 4 * ENTRIES / 2
    assert bytes_sent(replace(many, density=0.01), 64) < bytes_sent(many, 64)
    few = replace(many, value_format="1bit", exchange="auto")
    # A bit for each entry and for each value.
    assert bytes_sent(few, 2) == pytest.approx(1.3 / 8 * ENTRIES / 2, rel=0.01)
    assert bytes_sent(replace(few, exchange="hierarchical"), 2) == bytes_sent(few, 2)


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        ({}, {"local_steps", "density"}),
        ({"local_steps": None, "density": None}, {"local_steps", "density"}),
        ({"local_steps": 4, "overlap_steps": 2}, {"density"}),
        ({"density": 0.3}, {"local_steps"}),
        ({"density": 0.3, "local_steps": 8}, set()),
        ({"compress": "gradients"}, set()),
    ],
)
def test_what_is_given_is_kept(settings: dict[str, Any], left_out: set[str]) -> None:
    asked = UserSettings.of(settings)
    assert asked.left_out == left_out
    for ranks in (1, 2, 8):
        for steps in (10, 3000, 10**6, math.inf):
            chosen = asked.for_run(ranks, steps)
            assert all(
                getattr(chosen, name) == value
                for name, value in settings.items()
                if value is not None
            )
            if ranks == 1:
                assert chosen == asked.config


def test_a_round_is_no_shorter_than_a_delay() -> None:
    assert UserSettings.of({"overlap_steps": 5}).for_run(8, 10).local_steps == 5


def test_a_run_of_unknown_length_begins_short_and_doubles() -> None:
    settings = RunSettings(NOTHING, 2, math.inf)
    assert (
        settings.config_after(0)
        == settings.config_after(SHORTEST - 1)
        == NOTHING.for_run(2, SHORTEST)
    )
    assert settings.config_after(3999) == settings.config_after(3000)
    for steps in (1000, 5000, 50_000):
        assert settings.config_after(steps) == NOTHING.for_run(2, 2 * steps)
    assert settings.config_after(50_000) != settings.config_after(0)


def test_a_run_of_known_length_keeps_its_settings() -> None:
    settings = RunSettings(NOTHING, 2, 5000)
    assert settings.config_after(0) == settings.config_after(4999) == NOTHING.for_run(2, 5000)
    # Tensors that take turns depend on the settings that a run begins with.
    assert not RunSettings(UserSettings.of({"overlap_steps": 1}), 2, math.inf).grows


def test_the_last_tenth_of_a_long_run_is_its_end() -> None:
    asked = UserSettings.of({"local_steps": 4, "density": 0.1})
    settings = RunSettings(asked, 4, 5000)
    assert [settings.is_ending(steps) for steps in (1, 4500, 4501, 5000)] == [
        False,
        False,
        True,
        True,
    ]
    for steps, unknown in ((4999, ""), (math.inf, ""), (10_000, "it may end"), (5000, COUNTED)):
        assert not RunSettings(asked, 4, steps, unknown).is_ending(4999)
    # One that may end earlier and has not.
    assert RunSettings(asked, 4, 5000, "it may end").is_ending(4501)


def test_a_run_that_may_end_early_grows_up_to_its_most_steps() -> None:
    settings = RunSettings(NOTHING, 2, 6000, "it may end")
    free = RunSettings(NOTHING, 2, math.inf)
    assert all(
        settings.config_after(steps) == free.config_after(steps) for steps in (0, 999, 1000, 2500)
    )
    assert settings.config_after(5000) == NOTHING.for_run(2, 6000)
    assert RunSettings(NOTHING, 2, 300, "it may end").config_after(0) == NOTHING.for_run(2, 300)


def test_counted_steps_take_the_place_of_expected_ones() -> None:
    settings = RunSettings(NOTHING, 2, 20_000)
    assert not settings.is_off(16_000)
    assert settings.is_off(14_000)
    settings.expect(2000)
    assert (
        settings.config_after(0)
        == settings.config_after(1999)
        == NOTHING.for_run(2, 2000)
        != NOTHING.for_run(2, 20_000)
    )
    # Whatever is counted is new where nothing was known, and is no end where one may come before.
    for unknown, grows in ((COUNTED, False), ("it may end", True)):
        settings = RunSettings(NOTHING, 2, 2000, unknown)
        assert settings.is_off(2000) == (unknown == COUNTED)
        settings.expect(2000)
        assert settings.grows == grows
    assert not RunSettings(UserSettings.of({"overlap_steps": 1}), 2, 20_000).is_off(100)
