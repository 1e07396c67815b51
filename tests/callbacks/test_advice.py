"""What a run is told: sentences against arithmetic by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_dct import (
    DCTConfig,
    DCTElasticStrategy,
    DCTFSDPStrategy,
    DCTPipelineStrategy,
    DCTStrategy,
)
from lightning_dct.callbacks.run_advice import (
    FEWEST,
    SKIPPED,
    SlowRank,
    StepClock,
    StepCosts,
    dense_setting,
    notes_at_start,
    notes_on_link,
    run_length,
    slowest_rank,
    time_of_step,
    verdict,
    verdict_with_tables,
)
from lightning_dct.compress.awaited import clock_of
from lightning_dct.cost.timing import MeasuredLink, Speed
from lightning_dct.exchange.base import Collectives, Transfer
from lightning_dct.law import RunLength, UserSettings
from lightning_dct.traffic import Traffic
from pretended_stream import pretended_stream

GRADIENTS = DCTConfig(compress="gradients", density=0.03)
DENSE = DCTConfig(compress="gradients", density=1.0)
UPDATES = DCTConfig(local_steps=8, density=0.2)
# 1 Gbit/s from each of two ranks: 8 ns a byte of the tensor.
LINK = MeasuredLink(world_size=2, latency=0.002, seconds_per_byte=8e-9)


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lightning_dct.kernels._numba_error", lambda: ModuleNotFoundError("No module named 'numba'")
    )


def notes(
    config: DCTConfig | UserSettings,
    ranks: int,
    steps: float,
    device_type: str = "cuda",
    unknown: str = "",
) -> list[str]:
    asked = config if isinstance(config, UserSettings) else UserSettings(config)
    length = RunLength(steps, unknown)
    return notes_at_start(asked, ranks, length, device_type, "nobody to send to", "strategy='ddp'")


@pytest.mark.parametrize(("made", "counted"), [(511, 5), (5, 0), (4, 4)])
def test_steps_of_an_earlier_fit_are_no_part_of_the_length(made: int, counted: int) -> None:
    """By hand: of 1,000 steps Lightning has made some.

    To the step, because a resumed run chooses by them again.
    """
    limits = {
        "estimated_stepping_batches": 1000,
        "max_epochs": 1,
        "max_steps": -1,
        "num_training_batches": 1000,
    }
    strategy = SimpleNamespace(synchronizer=SimpleNamespace(synchronisations=counted, unclocked=0))
    module = SimpleNamespace(automatic_optimization=True)
    loop = {"callbacks": [], "optimizers": [None]}
    trainer = SimpleNamespace(
        **limits, **loop, lightning_module=module, strategy=strategy, global_step=made
    )
    assert run_length(trainer).steps == 1000 - made + counted  # type: ignore[arg-type]


def test_a_run_that_may_end_early_is_told_what_it_gets() -> None:
    """As of unknown length, but for no more steps than there may be."""
    (told,) = notes(UserSettings.of({}), 2, 10**6, unknown="it may end")
    assert (
        told
        == "The length of this run is not known (it may end): DCT takes local_steps=1, density=0.1,"
        " and fewer bytes as it goes on."
    )
    told, short = notes(UserSettings.of({}), 4, 300, unknown="it may end")
    assert "(it may end): DCT takes local_steps=1, density=0.3" in told
    assert short.startswith("This run is short for local_steps=1, density=0.3")


def test_a_run_that_leaves_settings_out_is_told_what_it_gets() -> None:
    """By the law 1.5% of the entries lose 0.035 / 0.015 / 4.667 = 0.5 after 4,667 steps."""
    (told,) = notes(UserSettings.of({}), 2, 4667)
    assert (
        told
        == "4,667 optimizer steps on 2 ranks: DCT takes local_steps=1, density=0.015, and expects"
        " the loss to be about 0.5% above that of plain DDP."
    )
    (told,) = notes(UserSettings.of({}), 2, 4600)
    assert "DCT takes local_steps=1, density=0.03," in told
    assert told.endswith("A run of 4,667 steps would send less.")
    (told,) = notes(UserSettings.of({"density": 0.3}), 2, 10_300)
    assert "DCT takes local_steps=4, density=0.3," in told
    (told,) = notes(UserSettings.of({}), 2, math.inf)
    assert (
        told
        == "The length of this run is not known: DCT takes local_steps=1, density=0.1, and fewer"
        " bytes as it goes on, as for a run of 1,000 optimizer steps. A shorter run loses more:"
        " tell its length by `Trainer(max_steps=...)`."
    )
    # The longest runs of all have nothing more to save.
    assert "would send less" not in notes(UserSettings.of({}), 2, 10**7)[0]


def test_a_run_too_short_for_any_setting_is_warned() -> None:
    told = notes(UserSettings.of({}), 4, 300)
    # One figure, below.
    assert told[0] == "300 optimizer steps on 4 ranks: DCT takes local_steps=1, density=0.3."
    assert told[1].startswith(
        "This run is short for local_steps=1, density=0.3: the loss may be 2% above that of"
    )
    assert told[1].endswith(
        "Train for 700 steps or more, or use strategy='ddp': all other settings lose more."
    )


def test_settings_that_do_not_fit_the_length_are_warned_of() -> None:
    (note,) = notes(replace(UPDATES, local_steps=4), 2, 2000)
    assert (
        note == "This run is short for local_steps=4, density=0.2: the loss may be 2% above that of"
        " plain DDP. Train for 5,024 steps or more, or leave out `local_steps` and `density`:"
        " local_steps=1, density=0.05 would fit."
    )
    (note,) = notes(UPDATES, 2, 10**6)
    assert (
        note
        == "No run is long enough for local_steps=8, density=0.2: the loss may be 1% above that of"
        " plain DDP; leave out `local_steps` and `density`: local_steps=1, density=0.015 would"
        " fit."
    )
    (note,) = notes(GRADIENTS, 2, 333)
    assert "1 / density = 34 of them" in note
    assert note.endswith("or give density=0.04, which fits.")
    assert not notes(replace(GRADIENTS, density=0.04), 2, 333)
    for steps in (5024, math.inf):
        assert not notes(replace(UPDATES, local_steps=4), 2, steps)
    assert not notes(DENSE, 2, 3)


def test_the_dense_exchange_that_is_advised_can_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the settings that each strategy accepts; only stages exchange gradients, and DDP
    holds whole models.
    """
    monkeypatch.setattr("lightning_dct.elastic.elastic_strategy.import_torchft", lambda: None)
    for strategy, dense in (
        (DCTStrategy(), "strategy='ddp'"),
        (DCTElasticStrategy(), "strategy='ddp'"),
        (DCTPipelineStrategy(), "the dense exchange (compress='gradients', density=1.0)"),
        (DCTFSDPStrategy(), "HSDP"),
    ):
        strategy._lightning_module = BoringModel()
        assert dense_setting(strategy) == dense


def test_the_dense_exchange_is_told_of_parameters_without_gradients() -> None:
    for settings, has_unused, optimizers, finds in (
        ({}, False, 1, False),
        ({}, True, 1, True),
        ({"find_unused_parameters": True}, False, 1, True),
        ({}, False, 2, True),  # a backward is of the parameters of one
    ):
        strategy = DCTStrategy(**settings)
        strategy._lightning_module = BoringModel()
        # type: ignore[list-item]
        strategy.has_unused = has_unused
        strategy._optimizers = [None] * optimizers
        expected = "strategy='ddp_find_unused_parameters_true'" if finds else "strategy='ddp'"
        assert dense_setting(strategy) == expected


def test_a_recommender_is_told_of_its_rows() -> None:
    """The verdict is of parameters outside the tables, and says so; and what most of the time is
    for.
    """
    few = StepCosts(0.1, 0.01, 0.002, 0.001)
    many = StepCosts(0.1, 0.01, 0.002, 0.05)
    assert verdict_with_tables("so much.", few) == "Outside the tables: so much."
    assert (
        "for the rows of the tables: a lower `density` of `ShardedEmbeddingBags`"
        in verdict_with_tables("x", many)
    )


def test_who_has_nobody_to_send_to_is_told_so() -> None:
    assert notes(UPDATES, 1, 10) == ["nobody to send to"]
    assert (
        notes_at_start(
            UserSettings(UPDATES), 1, RunLength(10), "cpu", DCTPipelineStrategy.when_alone, ""
        )
        == []
    )


def test_a_missing_kernel_is_named(without_numba: None) -> None:
    (note,) = notes(UPDATES, 2, math.inf, "cpu")
    assert "numba cannot be used (No module named 'numba')" in note
    assert "`pip install numba`" in note
    assert not notes(UPDATES, 2, math.inf)
    assert not notes(DCTConfig(kernel="torch"), 2, math.inf, "cpu")


def test_a_link_on_which_compressing_cannot_pay_is_named_at_the_start() -> None:
    """By hand: an entry takes 12 ns to compress, clear and read twice, and spares the link 32
    bits.
    """
    config = DCTConfig(local_steps=1, density=0.001)
    speed = Speed(4e-9, 2e-9, 3e-9, "made up")
    (told,) = notes_on_link(
        config, 1_000_000, replace(LINK, seconds_per_byte=1e-9), speed, "strategy='ddp'"
    )
    assert (
        told
        == "On this link of 8 Gbit/s, strategy='ddp' is likely faster: compressing pays on links"
        " below about 2.7 Gbit/s."
    )
    (told,) = notes_on_link(config, 1_000_000, replace(LINK, seconds_per_byte=0.0), speed, "HSDP")
    assert told.startswith("On this link, HSDP is likely faster")
    assert notes_on_link(config, 1_000_000, LINK, speed, "strategy='ddp'") == []
    assert (
        notes_on_link(DENSE, 1_000_000, LINK, Speed(0.0, 0.0, 0.0, "made up"), "strategy='ddp'")
        == []
    )


@pytest.mark.parametrize(
    ("config", "costs", "told"),
    [
        # DDP's all-reduce of 2 MB: 10 + 8 ms.
        (
            UPDATES,
            (0.1, 0.004, 0.003),
            "Synchronising takes 7% of a step: no setting would make it much faster.",
        ),
        (
            UPDATES,
            (0.1, 0.02, 0.01),
            "strategy='ddp' is faster on this link, or local_steps=16, which halves the cost.",
        ),
        (UPDATES, (0.1, 0.04, 0.01), "strategy='ddp' is faster on this link."),
        (GRADIENTS, (0.1, 0.02, 0.01), "strategy='ddp' is faster on this link."),
        (
            UPDATES,
            (0.1, 0.002, 0.01),
            (
                "overlap_steps=8 would hide the waiting behind training, local_steps=16 would halve"
                " both."
            ),
        ),
        (
            DCTConfig(local_steps=8, overlap_steps=8),
            (0.1, 0.002, 0.01),
            "local_steps=16 would halve compressing and waiting.",
        ),
        (GRADIENTS, (0.1, 0.002, 0.01), "a lower density sends fewer bytes."),
        # What already is the dense exchange.
        (
            DENSE,
            (0.1, 0.0, 0.05),
            "nothing is compressed: compress='updates' would exchange less, and less often.",
        ),
        (
            DENSE,
            (0.1, 0.0, 0.005),
            "Synchronising takes 5% of a step: no setting would make it much faster.",
        ),
    ],
)
def test_the_end_says_which_setting_would_be_better(
    config: DCTConfig, costs: tuple[float, float, float], told: str
) -> None:
    line = verdict(
        config, StepCosts(*costs), LINK.all_reduce_seconds(2_000_000), "cuda", "strategy='ddp'"
    )
    assert line.endswith(told)
    assert line.count("\n") == 0


def test_the_end_says_what_ddp_would_have_taken() -> None:
    """By hand: 100 ms less 12 is what training takes, DDP adds at most the 18 ms of its
    all-reduce.
    """
    costs = StepCosts(0.1, 0.01, 0.002)
    line = time_of_step(costs, 0.018, LINK, "DDP")
    assert line.startswith(
        "100 ms: 10 ms compressing, 2 ms waiting; with DDP 88 ms to 106 ms on the link"
    )
    assert line.endswith("as timed at the start (1 Gbit/s)")
    # Where the all-reduce is longer than all else, backward cannot hide it.
    assert "; with HSDP 1,000 ms to 1,088 ms on the link" in time_of_step(costs, 1.0, LINK, "HSDP")
    assert "; with DDP 88 ms on the link" in time_of_step(costs, 1e-5, LINK, "DDP")
    assert time_of_step(StepCosts(0.1, 0.0, 2e-5), 0.1, LINK, "DDP").startswith(
        "100 ms: under 0.1 ms compressing, under 0.1 ms waiting;"
    )


def test_slow_compressing_without_numba_names_the_package(without_numba: None) -> None:
    line = verdict(UPDATES, StepCosts(0.1, 0.012, 0.001), 0.018, "cpu", "strategy='ddp'")
    assert line.endswith("`pip install numba`.")


@pytest.mark.parametrize(
    ("paces", "slow"),
    [
        ({0: (2.1, 2.0), 1: (2.1, 0.1)}, SlowRank(1, 1.9 / 2.1, 0.95)),
        ({0: (1.0, 0.5), 1: (1.0, 0.1), 2: (1.0, 0.3)}, SlowRank(1, 0.2, 0.5)),
        ({0: (1.0, 0.1), 1: (1.0, 0.5), 2: (1.0, 0.1)}, SlowRank(0, 0.0, 0.0)),
        ({0: (1.0, 0.0), 1: (1.0, 0.0)}, None),
        ({0: (1.0, 0.5)}, None),
    ],
    ids=["one of two", "one of three", "two of three", "nobody waits", "one has reported"],
)
def test_the_slowest_rank_is_the_one_that_waits_least(paces: dict, slow: SlowRank | None) -> None:
    """Oracle: by hand; of two equally slow ranks neither costs anything, because the others would
    wait anyway.
    """
    assert slowest_rank(paces) == (slow if slow is None else pytest.approx(slow))


def test_a_link_whose_rate_does_not_show_has_none() -> None:
    link = MeasuredLink(2, 0.001, 0.0)
    assert link.bits_per_second is None
    assert link.all_reduce_seconds(5_000_000) == 0.001
    assert time_of_step(StepCosts(0.1, 0.01, 0.002), 0.001, link, "DDP").endswith(
        "on the link as timed at the start"
    )
    assert LINK.all_reduce_seconds(0) == pytest.approx(0.002)


def test_steps_are_timed_without_what_lies_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr("lightning_dct.traffic.Clock.mark", lambda _: now.seconds)
    clock = StepClock()
    traffic = Traffic()
    for step in range(SKIPPED + FEWEST + 1):
        assert clock.costs is None
        if step == SKIPPED + 2:
            clock.pause()
            now.seconds += 1000.0
        now.seconds += 100.0 if step < SKIPPED else 2.0
        traffic.add(steps=1, seconds=0.5, seconds_waiting=1)
        clock.after_step(traffic)
    assert clock.costs == StepCosts(2.0, 0.5, 1.0)
    assert clock.costs.synchronising == 1.5


def test_batches_without_a_step_are_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches a step.

    After a pause the first batch ends no step, so time begins with the second.
    """
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr("lightning_dct.traffic.Clock.mark", lambda _: now.seconds)
    clock = StepClock()
    traffic = Traffic()
    for batch in range(4 * (SKIPPED + FEWEST)):
        now.seconds += 1.0
        traffic.add(steps=batch % 2)
        clock.after_step(traffic)
        if batch == 2 * SKIPPED + 7:
            clock.pause()
            now.seconds += 1000.0
    assert clock.costs is not None
    assert clock.costs.total == 2.0


def test_on_a_gpu_the_stream_is_timed_and_not_its_host_which_waits_for_nothing() -> None:
    """By hand: 20 ms of training, of which backward hides nothing, 3 of compressing, 370 behind a
    `wait()` of NCCL.
    """
    with pretended_stream() as stream:
        clock = StepClock()
        traffic = Traffic(clock=clock_of(torch.device("cuda")))
        work = SimpleNamespace(wait=lambda: stream.work(0.37))

        def exchange() -> Collectives:
            yield work
            stream.work(0.001)
            return torch.zeros(1)

        for step in range(SKIPPED + FEWEST + 2):
            if step == SKIPPED + 5:
                clock.pause()
                stream.work(1000.0)
            stream.work(0.02)
            with traffic.timed("compress"):
                stream.work(0.002)
            Transfer(exchange(), 1, torch.device("cpu")).advance(traffic, check_finite=False)
            traffic.add(steps=1)
            done = stream.done
            clock.after_step(traffic)
            # The host waits only where steps begin to be timed.
            assert (stream.done > done) == (step in (SKIPPED - 1, SKIPPED + 5))
        costs = clock.costs
    assert costs is not None
    assert (costs.total, costs.compressing, costs.waiting) == pytest.approx((0.393, 0.003, 0.37))
