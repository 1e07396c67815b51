"""Chooses the settings of a run by the costs of its first steps, and again when these change for long."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_dct.callbacks.requirements import run_length
from lightning_dct.callbacks.run_advice import RunAdvice, StepClock, StepCosts
from lightning_dct.config import DCTConfig, check_density, check_positive
from lightning_dct.cost.auto import (
    Measured,
    Option,
    check_left_out,
    choose,
    dense,
    describe,
    measure_speeds,
    predict_dense,
    predict_updates,
    reason,
    table_of,
)
from lightning_dct.cost.timing import Speed, find_slowest, measure_link
from lightning_dct.cost.workload import workload_of
from lightning_dct.exchange.factory import find_layout
from lightning_dct.law import BY_LENGTH, Given
from lightning_dct.tables import plain_table

WINDOW = 10
"""Steps that are timed together, or as many more as make whole rounds."""
SPENT = 1.0
"""Seconds that a run may wait for DDP, or for other ranks, while steps are timed."""
IN_WARMUP = 8
"""A step of the warm-up is taken to wait so many times as long as one after it, which exchanges less often."""
CHANGED = 1 / 3
PATIENCE = 2
"""So many windows in a row must differ by that share before anything is measured again."""
LARGE = 6
"""A window that differs by so many times that share counts twice. It takes three times as long."""


class AutoSettings(RunAdvice):
    """Takes the least lossy settings whose step is not much longer than one without synchronisation.

    ``DCTStrategy`` adds this callback. The link is timed before the first step. A run begins under DDP, whose steps
    lose nothing, and a window of steps is timed: compute, and waiting. Compressing is timed only if DDP takes too long.
    If two of its all-reduces take more than a second, the run begins with updates of few bytes instead. A run that has
    left DDP does not return, because each rank's optimizer then has its own state.

    All ranks use the numbers of the slowest rank after the same steps, so they decide alike.

    Args:
        base: The settings that are not chosen.
        target_overhead: By what share of a step without synchronisation a step may be longer.
        min_density: The least share of entries that an exchange may send.

    Raises:
        TypeError: One of them is no number.
        ValueError: One of them is out of range, or other settings were given that they choose.
    """

    def __init__(self, base: DCTConfig, target_overhead: float, min_density: float | None = None) -> None:
        super().__init__()
        check_positive("target_overhead", target_overhead)
        if min_density is not None:
            check_density("min_density", min_density)
        check_left_out(base)
        self.base, self.target_overhead, self.min_density = base, target_overhead, min_density or 0.0
        # The settings in force, with what they were predicted to cost; None while DDP is measured.
        self.chosen: Option | None = None
        self.decisions: list[str] = []
        # Whether enough steps were timed for that, on the present number of ranks.
        self._is_settled = False
        self._world_size = 0
        self._is_resumed = False
        self._forget()

    def _forget(self) -> None:
        self._window = StepClock(skipped=1, fewest=1)
        self._usual: StepCosts | None = None
        # An agreement on the costs of the last window that is under way.
        self._agreed_later: Callable[[], tuple[StepCosts, float, float]] | None = None
        self._speeds: dict[float, Speed] = {}  # of compressing, by density
        self._changed, self._patience = 0, PATIENCE
        self._was_warm = True
        self._is_first_window = True  # of DDP's steps

    @property
    def settings(self) -> DCTConfig:
        """The settings in force."""
        return dense(self.base) if self.chosen is None else self.chosen.config

    @property
    def real(self) -> float | None:
        """Seconds that a step has taken since the last choice, or since warm-up; None after too few of them."""
        return None if self._clock.costs is None else self._clock.costs.total

    def begin(self) -> DCTConfig:
        """The settings that a fit begins with: those of its checkpoint, or DDP's."""
        if not self._is_resumed:
            self.chosen, self.decisions, self._is_settled = None, [], False
        self._is_resumed = False
        return self.settings

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Time the link, and leave DDP at once if the run would wait too long for it."""
        super().on_train_start(trainer, pl_module)
        self._forget()
        if self._link is None:
            return
        strategy: Any = trainer.strategy
        self._before = strategy.traffic.totals
        place = strategy.node_rank, strategy.local_rank
        layout = find_layout(place, strategy.synchronizer.exchange.everyone.group)
        self._measured = Measured(0.0, self._link, layout, workload_of(pl_module))  # before any step
        # Others may have more data or less.
        self._steps = strategy.broadcast(run_length(trainer).steps)
        self._is_settled &= self._world_size == trainer.world_size
        self._world_size = trainer.world_size
        # DDP's first step is not timed, so a decision about it takes two.
        if self.chosen is None and 2 * self._measured.all_reduce_seconds(strategy.config) > SPENT:
            self._leave_ddp(strategy)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Choose settings when that is due and enough steps have been timed."""
        strategy: Any = trainer.strategy
        if self._link is None or strategy.is_accumulating:
            return
        self._mark_end_of_warmup(strategy)
        if not self._window.steps:
            return
        steps, length = self._window.steps, strategy.config.round_length
        window = -(-WINDOW // length) * length
        if self._agreed_later is not None and steps >= min(window, self._steps_of_agreement()):
            found, self._agreed_later = self._agreed_later(), None
            if self._have_changed(found[0]):
                self._decide(strategy, *found[:2])
                return
        if self.chosen is not None and steps < window:
            return
        if self._is_settled:
            self._agreed_later = self._agree(strategy)
            self._window.restart()
            return
        costs, compute, spent = self._agree(strategy)()
        if self.chosen is None:
            is_slow = costs.total > (1 + self.target_overhead) * compute
            if steps < WINDOW:
                if spent > SPENT and is_slow:
                    self._leave_ddp(strategy)
                return
            # Nobody returns to DDP, and its first steps are slower than later ones: time ten more before leaving it.
            if is_slow and self._is_first_window and spent <= SPENT:
                self._is_first_window = False
                self._window.restart()
                return
        self._decide(strategy, costs, compute)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Note the time."""
        super().on_train_batch_end(trainer)
        strategy: Any = trainer.strategy
        self._window.after_step(strategy.traffic)

    def _verdict(self, strategy: Any, costs: StepCosts, dense: float) -> str:
        """The settings in force, beside whose predicted time the table has the real one."""
        if self.chosen is None:
            return f"The run was too short for DCTStrategy to choose: all of it was {describe(self.settings)}."
        milliseconds = 1e3 * self.chosen.seconds
        return f"DCTStrategy has chosen {describe(self.settings)}, predicted at {milliseconds:,.1f} ms a step."

    def state_dict(self) -> dict[str, Any]:
        """The decisions; the same on every rank."""
        names = ("compress", "local_steps", "density", "value_format")
        chosen = self.chosen and {
            **{name: getattr(self.chosen.config, name) for name in names},
            "seconds": self.chosen.seconds,
            "num_bytes": self.chosen.num_bytes,
        }
        return {
            "chosen": chosen,
            "is_settled": self._is_settled,
            "world_size": self._world_size,
            "decisions": self.decisions,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with saved decisions."""
        saved, self.chosen = dict(state_dict["chosen"] or {}), None
        if saved:
            seconds, num_bytes = saved.pop("seconds"), saved.pop("num_bytes")
            is_dense = saved["compress"] == "gradients"
            config = dense(self.base, saved["value_format"]) if is_dense else replace(self.base, **saved)
            self.chosen = Option(config, seconds, num_bytes)
        self._is_settled, self._world_size = state_dict["is_settled"], state_dict["world_size"]
        self.decisions = list(state_dict["decisions"])
        self._is_resumed = True

    def _pause(self) -> None:
        super()._pause()
        self._window.pause()

    def _agree(self, strategy: Any) -> Callable[[], tuple[StepCosts, float, float]]:
        """Start to find the slowest rank's costs of a step, compute and waits; the result waits for them."""
        own = self._window.costs
        assert own is not None
        waited = (strategy.traffic.totals - self._before).seconds_waiting
        numbers = own.total, own.compressing, own.waiting, own.total - own.synchronising, waited
        group = strategy.synchronizer.exchange.everyone.group
        find = find_slowest(numbers, group, strategy.root_device)

        def agreed() -> tuple[StepCosts, float, float]:
            total, compressing, waiting, compute, spent = find()
            return StepCosts(total, compressing, waiting), compute, spent

        return agreed

    def _steps_of_agreement(self) -> float:
        """Steps without an exchange that an agreement takes, so that nobody waits for it; the same on every rank."""
        usual, latency = self._usual, self._measured.link.latency
        return math.inf if usual is None else latency / max(usual.total - usual.synchronising, 1e-9)

    def _mark_end_of_warmup(self, strategy: Any) -> None:
        """Steps of the warm-up take another time than later ones: do not compare the two."""
        is_warm = strategy.updates is None or strategy.traffic.totals.steps > self.base.warmup_steps
        if is_warm and not self._was_warm:
            self._usual, self._agreed_later = None, None
            self._clock.restart()
            self._window.restart()
        self._was_warm = is_warm

    def _have_changed(self, costs: StepCosts) -> bool:
        """Whether steps have taken another time than usual for so many windows that measuring again is worth it."""
        usual = self._usual = self._usual or costs
        least = self.target_overhead * usual.total / 2
        steps, waits = abs(costs.total - usual.total), abs(costs.synchronising - usual.synchronising)
        windows = sum(
            steps > times * CHANGED * usual.total or waits > times * max(CHANGED * usual.synchronising, least)
            for times in (1, LARGE)
        )
        self._changed = self._changed + windows if windows else 0
        return self._changed >= self._patience

    def _leave_ddp(self, strategy: Any) -> None:
        """Continue with updates that make the run wait for at most a second while steps are timed."""
        longest = SPENT / WINDOW / IN_WARMUP
        self._choose(strategy, self._measured, [], longest, "until steps without DDP have been timed")

    def _decide(self, strategy: Any, costs: StepCosts, compute: float) -> None:
        if self._is_settled:
            self._link = measure_link(strategy.synchronizer.exchange.everyone.group, strategy.root_device)
            self._measured = replace(self._measured, link=self._link)
            self._speeds = {}
        measured = replace(self._measured, compute=compute)
        options: list[Option] = []
        if strategy.updates is None:
            options = predict_dense(measured, self.base, (strategy.config, costs.total - compute))
        longest = (1 + self.target_overhead) * compute
        why = f"{1e3 * compute:,.1f} ms a step without synchronisation; {measured}"
        self._choose(strategy, measured, options, longest, why)
        self._is_settled = True

    def _choose(self, strategy: Any, measured: Measured, options: list[Option], longest: float, why: str) -> None:
        chosen = choose(options, longest, self._steps) if options else None
        if chosen is None or chosen.seconds > longest:
            configs = Given(self.base, BY_LENGTH).rungs(len(measured.layout.places), self.min_density)
            if not self._speeds:
                everyone = strategy.synchronizer.exchange.everyone
                self._speeds = measure_speeds(configs, measured.workload, everyone.group, strategy.root_device)
            options = options + predict_updates(measured, configs, self._speeds)
            chosen = choose(options, longest, self._steps)
        before, self.chosen = self.chosen, chosen
        taken = reason(chosen, options, longest, self._steps)
        decision = f"After {strategy.traffic.totals.steps:,} steps DCTStrategy {taken} ({why})."
        self.decisions.append(decision)
        # Once, when a step without synchronisation has been timed: what comes before is an estimate, and what comes
        # after differs little.
        is_first = measured.compute > 0 and not self._is_settled
        table = f"\n{plain_table(table_of(options, chosen.config, self._steps))}" if is_first else ""
        rank_zero_info(f"{decision}{table}")
        is_new = before is None or before.config != chosen.config
        if strategy.config != chosen.config:
            strategy.change_settings(chosen.config)
        # If measuring again changed nothing, be more patient, but little: a link that falls must be seen soon.
        self._patience = PATIENCE if is_new else PATIENCE + 1
        self._usual, self._changed = None, 0
        if is_new:
            self._clock.restart()
        self._window.restart()
        self._pause()
