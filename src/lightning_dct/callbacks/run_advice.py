"""Advises a run: on settings unfit for its length before it begins, and at its end on the time of
its steps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_dct.callbacks.internal import InternalCallback
from lightning_dct.config import DCTConfig
from lightning_dct.cost.forecast import Forecast, layout_of
from lightning_dct.cost.timing import MeasuredLink, Speed, measure_link, measure_speed
from lightning_dct.cost.workload import one_tensor
from lightning_dct.kernels import faster_kernel_missing
from lightning_dct.law import (
    BY_LENGTH,
    COUNTED,
    SAFETY_FACTOR,
    SHORTEST,
    RunLength,
    RunSettings,
    UserSettings,
    expected_loss,
    steps_needed,
)
from lightning_dct.strategy_protocols import TrainerStrategy, strategy_of, synchronizer_of
from lightning_dct.traffic import FP32_BYTES, Traffic, TrafficTotals, rate_text

DELAYS_OF_GRADIENTS = 10  # so many should a run with gradients last, to make up for its start
MUCH = 0.1  # smallest share of a step that is worth advice
# Smallest share of a step spent waiting for one rank that brings a warning during training.
TOO_SLOW = 1 / 3
REPORT_EVERY_S = 5.0  # between two reports of a rank's times to rank 0
SKIPPED = (
    3  # first steps, which compile, allocate, and let DistributedDataParallel rebuild its buckets
)
FEWEST = 10  # with fewer steps there are no means
LIGHTNINGS_EPOCHS = 1000  # `max_epochs` of a Trainer that was given no limit
FIRST_COUNTED = 16  # batches after which a run's steps are counted first


def run_length(trainer: pl.Trainer) -> RunLength:
    """How long a fit is, less what an earlier one has made.

    Lightning says -1 if not known (data without a length).
    """
    steps = float(trainer.estimated_stepping_batches)
    epochs = trainer.max_epochs or -1
    most = trainer.max_steps
    steps = math.inf if steps < 0 else steps
    batches = float(trainer.num_training_batches) * (math.inf if epochs < 0 else epochs)
    unknown = "" if trainer.lightning_module.automatic_optimization else COUNTED
    if unknown and most > 0:  # of all optimizers together
        steps = min(steps, most / max(1, len(trainer.optimizers)))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, callbacks.GradientAccumulationScheduler) and math.isfinite(batches):
            each = map(callback.get_accumulate_grad_batches, range(epochs))
            steps = sum(
                math.ceil(trainer.num_training_batches / accumulated) for accumulated in each
            )
            steps = min(steps, most if most > 0 else math.inf)
            batches = 0.0
        if isinstance(callback, callbacks.EarlyStopping | callbacks.Timer):
            unknown = f"`{type(callback).__name__}` may end it"
    if epochs == LIGHTNINGS_EPOCHS and most < 0 and unknown in ("", COUNTED):
        unknown = f"max_epochs={epochs} is what Lightning takes for a run without any limit"
    made_elsewhere = (trainer.global_step - _counted(trainer)) / max(1, len(trainer.optimizers))
    return RunLength(max(1.0, steps - made_elsewhere), unknown, batches)


def _counted(trainer: pl.Trainer) -> int:
    """Those of Lightning's steps that the optimizers' clocks have: not those of an earlier fit or
    another strategy.
    """
    synchronizer = synchronizer_of(trainer)
    return min(trainer.global_step, synchronizer.synchronisations - synchronizer.unclocked)


def share_done(trainer: pl.Trainer, batches: float) -> float:
    """The share of a fit that is done, after 16, 32, 64 ... batches, where steps are counted; else,
    or if it is unknown, 0.

    Of data without a length it is known when an epoch begins.
    """
    done = trainer.fit_loop.epoch_loop.total_batch_idx
    epochs = (trainer.current_epoch, trainer.max_epochs or 0)
    if math.isinf(batches) and min(epochs) > 0:
        if trainer.fit_loop.epoch_loop.batch_idx:
            return 0.0
    elif not batches or done < FIRST_COUNTED or done & (done - 1):
        return 0.0
    limits = ((trainer.global_step, trainer.max_steps), epochs)
    share = min(
        1.0, max([done / batches, *(reached / most for reached, most in limits if most > 0)])
    )
    counted = share * (_counted(trainer) / max(1, trainer.global_step))
    return counted and counted / (1.0 - share + counted)


@dataclass(frozen=True)
class StepCosts:
    """Means over the steps of a run, in seconds: from one step's end to the next, and parts of
    that.

    ``inside`` is for what the model exchanges itself: rows of sharded tables, activations.
    """

    total: float
    compressing: float
    waiting: float
    inside: float = 0.0

    @property
    def synchronising(self) -> float:
        """Compressing and waiting."""
        return self.compressing + self.waiting


class StepClock:
    """Adds up the costs of steps, except the first few, without pauses between them such as a
    validation.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._seen = 0
        self._steps_before = -1
        self._sums = [0.0, 0.0, 0.0, 0.0]  # as in `StepCosts`
        # The end of the step before those that are not in the sums yet, with the totals up to it.
        self._since: tuple[Any, TrafficTotals, TrafficTotals] | None = None
        self._inside = Traffic()

    def after_step(self, traffic: Traffic, inside: Traffic | None = None) -> None:
        """Note the end of a step; with accumulation a batch may have none.

        ``inside`` counts what the model exchanges itself.
        """
        if traffic.totals.steps == self._steps_before:
            return
        self._steps_before = traffic.totals.steps
        self._seen += 1
        self._traffic = traffic
        self._last = traffic.clock.mark()
        self._inside = inside or self._inside
        if self._since is None and self._seen >= SKIPPED:
            # From here on times must be complete. This waits for a GPU.
            self._since = self._last, traffic.read_clocks(), self._inside.read_clocks()

    def pause(self) -> None:
        """Leave out the time from the last step to the next."""
        self._add_up()
        self._since = None

    @property
    def costs(self) -> StepCosts | None:
        """The means; None after too few steps. This waits for a GPU."""
        recent = 0 if self._since is None else self._traffic.totals.steps - self._since[1].steps
        if self._steps + recent < FEWEST:
            return None
        self._add_up()
        return StepCosts(*(seconds / self._steps for seconds in self._sums))

    def _add_up(self) -> None:
        if self._since is None:
            return
        start, before, inside_before = self._since
        after = self._traffic.read_clocks()
        inside = self._inside.read_clocks()
        spent = after - before
        spent_inside = inside - inside_before
        total = self._traffic.clock.seconds(start, self._last)
        new = (
            total,
            spent.seconds,
            spent.seconds_waiting,
            spent_inside.seconds + spent_inside.seconds_waiting,
        )
        self._sums = [sum(pair) for pair in zip(self._sums, new, strict=True)]
        self._steps = self._steps + spent.steps
        self._since = self._last, after, inside


class SlowRank(NamedTuple):
    """The slowest rank, and how long the others wait for it alone: as a part of a step, and of all
    their waiting.
    """

    rank: int
    share_of_step: float
    share_of_waiting: float


def slowest_rank(paces: Mapping[int, tuple[float, float]]) -> SlowRank | None:
    """The slowest rank; None if fewer than two ranks have reported or none waits.

    ``paces`` has each rank's seconds of a step, and the part of them that it waits. A rank waits
    for the network and for slower ranks, so the slowest waits least. Without it, the others would
    wait only for the second slowest.
    """
    by_waiting = sorted((waiting, rank) for rank, (_, waiting) in paces.items())
    if len(by_waiting) < 2 or by_waiting[-1][0] <= 0.0:
        return None
    (least, rank), *others = by_waiting
    lost = others[0][0] - least
    step = sum(total for total, _ in paces.values()) / len(paces)
    return SlowRank(rank, lost / step, lost * len(others) / sum(waiting for waiting, _ in others))


class RunAdvice(InternalCallback):
    """Print advice when fit begins, and give the table at its end a verdict; ``DCTStrategy`` adds
    this callback.

    Before the first step all ranks time all-reduces of up to 1 MiB for a moment. At the end of a
    run of more than a few steps, the verdict compares its costs with the dense all-reduce on the
    same link.
    """

    def __init__(self) -> None:
        self._clock = StepClock()
        self._link: MeasuredLink | None = None
        self._slow: SlowRank | None = (
            None  # the lifeline that knows it is closed when the table is made
        )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print notes on unfit settings, and time the link."""
        strategy = strategy_of(trainer)
        synchronizer = synchronizer_of(trainer)
        device = strategy.root_device
        everyone = synchronizer.exchange.everyone
        alone = strategy.when_alone
        dense = dense_setting(strategy)
        notes = notes_at_start(
            strategy.user_settings, everyone.size, run_length(trainer), device.type, alone, dense
        )
        self._clock = StepClock()
        self._report_at = 0.0
        self._has_warned = False
        self._slow = None
        self._link = None if everyone.size == 1 else measure_link(everyone.group, device)
        if self._link is not None and trainer.is_global_zero:
            config = synchronizer.config
            entries = synchronizer.entries_under_ddp()
            notes += notes_on_link(
                config, entries, self._link, measure_speed(config, [entries], 0.0, device), dense
            )
        for note in notes:
            rank_zero_info(note)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Note the time, and report it to rank 0 now and then, which warns once of a rank that
        slows down the others.
        """
        strategy = strategy_of(trainer)
        self._clock.after_step(strategy.traffic, strategy.split_traffic)
        if perf_counter() >= self._report_at:
            self._report(strategy)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the mean time over all steps."""
        self._report(strategy_of(trainer))

    def _report(self, strategy: TrainerStrategy) -> None:
        lifeline = strategy.lifeline
        if lifeline is None or (costs := self._clock.costs) is None:
            return
        self._report_at = perf_counter() + REPORT_EVERY_S
        slow = slowest_rank(lifeline.report_pace(costs.total, costs.waiting))
        if slow is not None and slow.share_of_step > TOO_SLOW and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"Rank {slow.rank} slows down all others, which wait for it during"
                f" {100 * slow.share_of_step:.0f}% of a step. Look at its data loader, its device,"
                " and at what else runs on its host."
            )
        self._slow = slow

    def pause(self, *_: Any, **__: Any) -> None:
        """Leave validations and checkpoints out of the time of steps."""
        self._clock.pause()

    on_validation_end = pause

    def summary_rows(self, trainer: pl.Trainer) -> list[tuple[str, str]]:
        """Rows for the table at the end of fit: the time of a step, and the verdict; none after too
        few steps.
        """
        strategy = strategy_of(trainer)
        synchronizer = synchronizer_of(trainer)
        costs = self._clock.costs
        if self._link is None or costs is None:
            return []
        dense = self._link.all_reduce_seconds(FP32_BYTES * synchronizer.entries_under_ddp())
        time = time_of_step(costs, dense, self._link, strategy.dense_rival)
        rows = [("time of a step", time)]
        slow = self._slow
        if slow is not None and slow.share_of_step > MUCH:
            cell = (
                f"rank {slow.rank}: the others wait for it during"
                f" {100 * slow.share_of_step:.0f}% of a step,"
                f" {100 * slow.share_of_waiting:.0f}% of all their waiting"
            )
            rows.append(("slowest rank", cell))
        config = synchronizer.config
        device = strategy.root_device
        line = verdict(config, costs, dense, device.type, dense_setting(strategy))
        if strategy.sharded_tables():
            share = 100 * costs.inside / costs.total
            rows.append(
                (
                    "rows of tables",
                    f"{_ms(costs.inside)} of a step ({share:.2g}%), beside the above",
                )
            )
            line = verdict_with_tables(line, costs)
        return [*rows, ("verdict", line)]


def dense_setting(strategy: TrainerStrategy) -> str:
    """The setting that gives the dense exchange: DDP holds neither shards, nor stages, nor sharded
    tables.

    DDP must be told of steps that leave parameters without a gradient; otherwise it ends with an
    error.
    """
    if strategy.dense_rival != "DDP":
        return strategy.dense_rival
    # With several optimizers a backward is of the parameters of one.
    is_told = getattr(strategy, "_ddp_kwargs", {}).get("find_unused_parameters", False)
    finds = strategy.has_unused or is_told or len(getattr(strategy, "_optimizers", ())) > 1
    if strategy.stages == 1 and not strategy.sharded_tables():
        return "strategy='ddp_find_unused_parameters_true'" if finds else "strategy='ddp'"
    more = ", find_unused_parameters=True" if finds and strategy.stages == 1 else ""
    return f"the dense exchange (compress='gradients', density=1.0{more})"


def notes_at_start(
    user_settings: UserSettings,
    ranks: int,
    length: RunLength,
    device_type: str,
    alone: str,
    dense: str,
) -> list[str]:
    """Notes for the start of a run of so many ranks, or replicas, that exchange with each other.

    ``alone`` is the note for a single rank, empty for none. ``dense`` is the setting that gives the
    dense exchange.
    """
    if ranks == 1:
        return [alone] if alone else []
    of_length = _on_gradients if user_settings.config.compress == "gradients" else notes_on_updates
    notes = of_length(user_settings, ranks, length, dense)
    if user_settings.config.kernel == "auto" and (missing := faster_kernel_missing(device_type)):
        notes.append(missing)
    return notes


def notes_on_link(
    config: DCTConfig, entries: int, link: MeasuredLink, speed: Speed, dense: str
) -> list[str]:
    """A note if ``plan`` finds the dense exchange of so many entries faster on this link."""
    ranks = link.world_size
    rate = link.bits_per_second or math.inf
    break_even = Forecast(
        config, one_tensor(entries), layout_of(ranks, ranks), 1.0, speed
    ).break_even
    if rate < break_even or math.isinf(break_even):
        return []
    fast = "" if math.isinf(rate) else f" of {rate_text(rate, digits=2)}"
    below = rate_text(break_even, digits=2)
    return [
        f"On this link{fast}, {dense} is likely faster: compressing pays on links below about"
        f" {below}."
    ]


def _on_gradients(
    user_settings: UserSettings, ranks: int, length: RunLength, dense: str
) -> list[str]:
    """Whether a run is long enough for its density."""
    density = user_settings.config.density
    steps = length.steps
    if density == 1.0 or DELAYS_OF_GRADIENTS / density <= steps:
        return []
    fitting = math.ceil(100 * DELAYS_OF_GRADIENTS / steps) / 100
    remedy = (
        f"give density={fitting:g}, which fits"
        if fitting < 1
        else f"use {dense}: compression would lose more"
    )
    return [
        f"This run is short: {steps:,.0f} optimizer steps. An unsent entry waits for about 1 /"
        f" density = {math.ceil(1 / density):,} of them, so a run should have"
        f" {math.ceil(DELAYS_OF_GRADIENTS / density):,} or more. Train for longer, or {remedy}."
    ]


def notes_on_updates(
    user_settings: UserSettings, ranks: int, length: RunLength, dense: str
) -> list[str]:
    """Says which settings were chosen, and whether the run is long enough for them."""
    steps, unknown, _ = length
    run = RunSettings(user_settings, ranks, steps, unknown)
    config = run.config_after(0)
    notes = []
    settings = _settings(config)
    if user_settings.left_out and (unknown or math.isinf(steps)):
        why = f" ({unknown})" if unknown else ""
        grows = ", and fewer bytes as it goes on" if run.grows else ""
        assumed = ""
        if math.isinf(steps):
            assumed = (
                f", as for a run of {SHORTEST:,} optimizer steps. A shorter run loses more: tell"
                " its length by `Trainer(max_steps=...)`"
            )
        notes.append(
            f"The length of this run is not known{why}: DCT takes {settings}{grows}{assumed}."
        )
    if math.isinf(steps):
        return notes
    loss = expected_loss(config, ranks, steps)
    needed = steps_needed(config, ranks)
    fits = steps >= needed
    if user_settings.left_out and not unknown:
        longer = [
            more
            for one in user_settings.candidates(ranks)
            if (more := steps_needed(one, ranks)) > max(steps, needed)
        ]
        notes.append(
            f"{steps:,.0f} optimizer steps on {ranks} ranks: DCT takes {settings}"
            # Of a short run the next note says what it may lose.
            + (
                f", and expects the loss to be about {percent(loss)} above that of plain DDP."
                if fits
                else "."
            )
            + (f" A run of {min(longer):,} steps would send less." if longer and fits else "")
        )
    if not fits:
        fitting = UserSettings(config, BY_LENGTH).for_run(ranks, steps)
        remedy = f"use {dense}: all other settings lose more"
        if steps_needed(fitting, ranks) <= steps:
            remedy = f"leave out `local_steps` and `density`: {_settings(fitting)} would fit"
        short = "This run is short"
        train = f". Train for {needed:,} steps or more, or"
        if math.isinf(needed):
            short = "No run is long enough"
            train = ";"
        may = f"{percent(SAFETY_FACTOR * loss)} above that of plain DDP"
        notes.append(f"{short} for {settings}: the loss may be {may}{train} {remedy}.")
    return notes


def percent(loss: float) -> str:
    """A loss in percent, for a message."""
    return f"{loss:.1g}%" if loss < 9.5 else f"{loss:,.0f}%"


def _settings(config: DCTConfig) -> str:
    return f"local_steps={config.local_steps}, density={config.density:g}"


def time_of_step(costs: StepCosts, dense: float, link: MeasuredLink, rival: str) -> str:
    """The time of a step, and that of a step of ``rival``, the dense exchange.

    Its all-reduce takes ``dense`` seconds on the link, of which backward may hide all or none.
    """
    rest = costs.total - costs.synchronising
    least = _ms(max(rest, dense))
    most = _ms(rest + dense)
    rate = "" if link.bits_per_second is None else f" ({rate_text(link.bits_per_second, digits=2)})"
    return (
        f"{_ms(costs.total)}: {_ms(costs.compressing)} compressing, {_ms(costs.waiting)} waiting;"
        f" with {rival} {least if least == most else f'{least} to {most}'} on the link as timed at"
        f" the start{rate}"
    )


def verdict(
    config: DCTConfig, costs: StepCosts, dense: float, device_type: str, remedy: str
) -> str:
    """The setting that would be better; ``remedy`` is the setting that gives the dense exchange."""
    is_dense = config.compress == "gradients" and config.density == 1.0
    rarer = f"local_steps={2 * config.local_steps}" if config.compress == "updates" else None
    if costs.synchronising >= dense and not is_dense:
        advice = f"Compressing costs more than it saves here: {remedy} is faster on this link"
        halved = rarer and costs.synchronising < 2 * dense
        return f"{advice}, or {rarer}, which halves the cost." if halved else f"{advice}."
    share = f"Synchronising takes {100 * costs.synchronising / costs.total:.2g}% of a step"
    if costs.synchronising < MUCH * costs.total:
        return f"{share}: no setting would make it much faster."
    if is_dense:
        return (
            f"{share}, and nothing is compressed: compress='updates' would exchange less, and less"
            " often."
        )
    if costs.compressing > costs.waiting and (missing := faster_kernel_missing(device_type)):
        return missing
    if rarer and config.overlap_steps == 0 and costs.waiting > costs.compressing:
        return (
            f"overlap_steps={config.local_steps} would hide the waiting behind training, {rarer}"
            " would halve both."
        )
    if rarer:
        return f"{rarer} would halve compressing and waiting."
    return "compress='updates' would exchange less often; a lower density sends fewer bytes."


def verdict_with_tables(line: str, costs: StepCosts) -> str:
    """The verdict of a recommender: ``line`` is that on parameters outside its tables."""
    if costs.inside <= costs.synchronising or costs.inside < MUCH * costs.total:
        return f"Outside the tables: {line}"
    return (
        "Most of what exchanges take is for the rows of the tables: a lower `density` of"
        f" `ShardedEmbeddingBags` sends less of them. Outside the tables: {line}"
    )


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    if milliseconds < 0.1:
        return "under 0.1 ms"
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"
