"""A run that sets itself, on real ranks: they decide alike, train alike, and go on from a checkpoint bit for bit."""

import contextlib
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import DEFAULT, patch

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import ConcatDataset, DataLoader

from distributed.test_resume import SaveAndStop
from distributed.training import (
    Module,
    Noise,
    Run,
    assert_replicas_equal,
    assert_weights_close,
    assert_weights_equal,
    fit,
    rank,
)
from lightning_dct import DCTStrategy, thresholded
from lightning_dct.callbacks import auto_settings, run_advice
from lightning_dct.callbacks.run_advice import StepCosts
from lightning_dct.commands import main, plan
from lightning_dct.compress.awaited import StreamClock
from lightning_dct.config import DCTConfig
from lightning_dct.cost import auto, timing
from lightning_dct.cost.timing import MeasuredLink
from lightning_dct.exchange import base, collectives
from pretended_stream import PretendedStream, pretended_stream

NEVER = 10**9
FAST = (1e-3, 1e-9)
SLOW = (1e-3, 1e-5)
HOPELESS = (1e-3, 1e-3)
"""Seconds for nothing, and a byte."""


@contextmanager
def links(*rates: tuple[float, float], patience: int = NEVER, changed: float = 1 / 3) -> Iterator[None]:
    """What ranks are made to believe they measure: one link after the other, the last one for good."""
    found = [MeasuredLink(2, seconds, per_byte) for seconds, per_byte in rates]

    def measure(*_: Any) -> MeasuredLink:
        return found.pop(0) if len(found) > 1 else found[0]

    with (
        patch.object(auto_settings, "measure_link", measure),
        patch.object(run_advice, "measure_link", measure),
        patch.object(auto_settings, "PATIENCE", patience),
        patch.object(auto_settings, "CHANGED", changed),
    ):
        yield


def data(times: int = 3) -> DataLoader:
    """The same twenty batches over and over: a resumed run begins them anew."""
    return DataLoader(ConcatDataset(times * [Noise(20, 40, 8, rank=rank())]), batch_size=None)


def module() -> Module:
    return Module(None, torch.optim.Adam, lr=0.01)


def train(
    rates: list[tuple[float, float]],
    strategy: dict[str, Any],
    more: dict[str, Any] | None = None,
    batches: int = 3,
    **trainer: Any,
) -> tuple[Run, DCTStrategy]:
    chosen = DCTStrategy(**{"target_overhead": 1e-6, "warmup_steps": 8, **strategy})
    with links(*rates, **(more or {})):
        run = fit(chosen, module(), data(batches), **trainer)
    return run, chosen


def decisions(rates: list[tuple[float, float]], strategy: dict[str, Any], *more: Any, **trainer: Any) -> Any:
    with patch.object(auto_settings, "table_of", wraps=auto_settings.table_of) as tables:
        run, chosen = train(rates, strategy, *more, **trainer)
    # Every decision is a sentence; the table of all settings comes with one of them.
    assert tables.call_count <= 1
    return run, chosen.auto.decisions, chosen.config, chosen.auto.state_dict()


@pytest.mark.parametrize(
    ("rates", "strategy", "taken"),
    [
        # Nothing is within a millionth: the fastest for which 60 steps are enough.
        ([FAST], {}, ["plain DDP|DDP in bf16|updates every step, 30%"]),
        ([HOPELESS], {}, ["updates every step, 30%", "updates every step, 30%"]),
        ([HOPELESS], {"min_density": 0.4}, ["updates every step, 40%"] * 2),
        ([FAST], {"target_overhead": 1e6}, ["plain DDP"]),
    ],
)
def test_ranks_decide_alike(
    ranks: Any, rates: list[tuple[float, float]], strategy: dict[str, Any], taken: list[str]
) -> None:
    (run, told, config, state), other = ranks(2).run(decisions, rates, strategy)
    assert (told, config, state) == other[1:]
    assert len(told) == len(taken)
    for sentence, settings in zip(told, taken, strict=True):
        assert any(f"DCTStrategy takes {one}: predicted at " in sentence for one in settings.split("|"))
    # Nobody leaves DDP by its first ten steps alone.
    steps = 0 if rates == [HOPELESS] else 11 if strategy else 21
    assert told[0].startswith(f"After {steps} steps")
    assert_replicas_equal([run, other[0]])
    assert run.totals.steps == 60


def slow_at_first() -> Any:
    """A run under DDP whose first ten steps wait for four fifths of their time, and no later one at all."""

    def agree(self: Any, strategy: Any) -> Callable[[], tuple[StepCosts, float, float]]:
        steps = strategy.traffic.totals.steps
        waiting = 0.04 if steps <= 11 else 0.0
        return lambda: (StepCosts(0.01 + waiting, 0.0, waiting), 0.01, steps * waiting)

    with patch.object(auto_settings.AutoSettings, "_agree", agree):
        return decisions([FAST], {"target_overhead": 0.05})


def test_slow_first_steps_do_not_end_ddp(ranks: Any) -> None:
    for _, told, *_ in ranks(2).run(slow_at_first):
        (decision,) = told
        assert decision.startswith("After 21 steps DCTStrategy takes plain DDP")


class Trains(Callback):
    """A step that keeps a pretended GPU busy for 20 ms."""

    def __init__(self, stream: PretendedStream) -> None:
        self.stream = stream

    def on_train_batch_start(self, *_: Any) -> None:
        self.stream.work(0.02)


def on_a_gpu() -> Any:
    """DDP's all-reduce takes 370 ms, for which the host does not wait."""

    def all_reduce(*arguments: Any) -> Any:
        work = collectives.all_reduce_mean(*arguments)
        return SimpleNamespace(wait=lambda: (work.wait(), stream.work(0.37)))

    with (
        pretended_stream() as stream,
        patch.object(thresholded, "clock_of", StreamClock),
        patch.object(base, "all_reduce_mean", all_reduce),
    ):
        return decisions([(1e-3, 7.8e-5)], {"target_overhead": 0.05}, callbacks=[Trains(stream)])


def test_a_gpu_leaves_ddp_though_its_host_waits_for_nothing(ranks: Any) -> None:
    for _, told, *_ in ranks(2).run(on_a_gpu):
        assert told[0].startswith("After 3 steps DCTStrategy takes updates every step, 30%")
        assert "(20.0 ms a step without synchronisation; " in told[1]


def steps_of_agreements() -> list[tuple[int, int]]:
    """The steps before which each agreement on the costs of a window began, and was read."""
    now, seen = Counted(), []

    def find(*arguments: Any) -> Any:
        started, result = now.steps, timing.find_slowest(*arguments)

        def read() -> list[float]:
            seen.append((started, now.steps))
            return result()

        return read

    with patch.object(auto_settings, "find_slowest", find):
        decisions([(10.0, 1e-9)], {"target_overhead": 1e6}, callbacks=[now])
    return seen


class Counted(Callback):
    steps = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1


def test_nobody_waits_for_an_agreement_on_a_settled_run(ranks: Any) -> None:
    """A round trip may take as long as many steps: here far longer than a window, so it is read after the next one."""
    first, other = ranks(2).run(steps_of_agreements)
    assert first == other
    # The decision needs the first window at once. The window in which the warm-up ended is dropped.
    assert first[0][0] == first[0][1]
    assert first[1:] == [(30, 40), (40, 50)]


def under_ddp() -> Run:
    return fit(DDPStrategy(), module(), data())


def test_where_ddp_is_fast_enough_it_is_ddp(ranks: Any) -> None:
    """Oracle: Lightning's own strategy."""
    expected = ranks(2).run(under_ddp)
    for (run, *_), plain in zip(ranks(2).run(decisions, [FAST], {"target_overhead": 1e6}), expected, strict=True):
        assert_weights_close(plain.weights, run.weights, rtol=1e-5, atol=1e-6)


def resumed(path: Path, strategy: dict[str, Any]) -> Any:
    return decisions([SLOW], strategy, ckpt_path=str(path))


def saving(path: Path, strategy: dict[str, Any], rates: Any) -> Any:
    return decisions(rates, strategy, callbacks=[SaveAndStop(path, 40, stop=False)])


@pytest.mark.parametrize(("rates", "strategy"), [([HOPELESS], {}), ([FAST], {"target_overhead": 1e6})])
def test_a_resumed_run_is_the_same_run(ranks: Any, tmp_path: Path, rates: Any, strategy: dict[str, Any]) -> None:
    """Oracle: the run that went on after it had saved, every bit, though the resumed one is shown another link."""
    path = tmp_path / "x.ckpt"
    whole = ranks(2).run(saving, path, strategy, rates)
    for (run, told, config, _), again in zip(whole, ranks(2).run(resumed, path, strategy), strict=True):
        assert again[1:3] == (told, config)
        assert again[0].hashes == run.hashes[40:]
        assert_weights_equal(run.state.get("weights", run.weights), again[0].state.get("weights", again[0].weights))


def long_run(*arguments: Any) -> Any:
    """A run for which no settings need too many steps."""
    with patch.object(auto, "steps_needed", lambda *_: 0):
        return decisions(*arguments)


def test_a_link_that_falls_is_measured_again(ranks: Any) -> None:
    """Oracle: fewer bytes at each decision; what was held back stays in each rank's own weights."""
    more = {"patience": 1, "changed": -1.0}
    long = {"target_overhead": 0.5, "warmup_steps": 0}
    results = ranks(2).run(long_run, [HOPELESS], long, more, 10)
    (run, told, config, _), other = results
    assert (told, config) == other[1:3]
    assert len(told) > 2
    assert config.round_length > 1
    assert_replicas_equal([run, other[0]])
    own = [one.state["weights"]["model.first.weight"] for one in (run, other[0])]
    assert not torch.equal(*own)


def bf16_and_fp32() -> list[Run]:
    formats = ("fp32", "bf16")
    return [fit(DCTStrategy(compress="gradients", density=1.0, value_format=one), module(), data(1)) for one in formats]


def test_bf16_averages_in_half_the_bytes(ranks: Any) -> None:
    for whole, half in ranks(2).run(bf16_and_fp32):
        assert half.totals.bytes_sent * 2 == whole.totals.bytes_sent == whole.totals.bytes_dense
        assert_weights_close(whole.weights, half.weights, rtol=0.1, atol=0.02)
        assert whole.hashes != half.hashes


def test_nobody_to_exchange_with(ranks: Any) -> None:
    ((run, told, *_),) = ranks(1).run(decisions, [FAST], {})
    assert told == []
    assert run.totals.steps == 60


def measure_and_plan(*words: str) -> tuple[int, str]:
    printed = io.StringIO()
    none = {"init_process_group": DEFAULT, "destroy_process_group": DEFAULT}
    with (
        links(SLOW),
        patch.object(plan, "measure_link", lambda *_: auto_settings.measure_link()),
        patch.multiple(plan.dist, **none),
        contextlib.redirect_stdout(printed),
    ):
        return main(["plan", "--measure", *words]), printed.getvalue()


def test_a_plan_measures_and_prints_what_a_run_would_choose(ranks: Any) -> None:
    """By hand: 40 s for dense gradients on this link, half in bf16; 558 steps are needed for 10% on two ranks."""
    words = ["--parameters", "1M", "--compute-ms", "1000", "--steps", "800"]
    (status, printed), (other, nothing) = ranks(2).run(measure_and_plan, *words)
    assert (status, other, nothing) == (0, 0, "")
    rows = {line[:28].strip(): line.split() for line in printed.splitlines()}
    assert rows["plain DDP"][2:4] == ["41,001.0", "4,000,000"]
    assert rows["DDP in bf16"][3:5] == ["21,001.0", "2,000,000"]
    assert rows["updates every step, 10%"][-1] == "taken"
    assert printed.count("this run is too short") == 9  # the rows below it for two ranks in docs/settings.md
    for lacking in ([], ["--compute-ms", "0"]):
        assert ranks(2).run(measure_and_plan, "--parameters", "1M", *lacking) == [(2, "")] * 2


@pytest.mark.parametrize(
    ("seconds", "windows"),
    [
        # Of a usual step of 1 s, of which it waits for 0.1 s: within a third; beyond it twice; three times as long.
        ([(1.3, 0.12), (0.7, 0.08)] * 3, None),
        ([(1.0, 0.1), (1.4, 0.1), (1.4, 0.1)], 3),
        ([(1.4, 0.1), (1.0, 0.1), (1.4, 0.1)], None),
        ([(1.0, 0.14), (1.0, 0.06)], 2),
        ([(1.0, 0.1), (3.1, 0.1)], 2),
        ([(1.2, 0.31)], 1),
    ],
)
def test_a_change_is_noticed(seconds: list[tuple[float, float]], windows: int | None) -> None:
    auto = auto_settings.AutoSettings(DCTConfig(), 0.05)
    assert not auto._have_changed(StepCosts(1.0, 0.0, 0.1))
    noticed = [auto._have_changed(StepCosts(total, 0.0, waiting)) for total, waiting in seconds]
    assert (noticed.index(True) + 1 if True in noticed else None) == windows
