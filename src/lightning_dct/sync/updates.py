"""Exchanges the updates of weights, after every ``local_steps`` steps of the user's optimizer.

    rank r         w_r <- user's optimizer (w_r)                      ``local_steps`` times
                   a_r  = w_r - S                                     the update, and what was not sent before
                   c_r  = the entries of a_r that reach a threshold, in few bits
    every rank     m    = f / W * sum over ranks of c_r               any exchange
                   S   += m,   w_r += m - c_r

``S`` are the shared weights. A rank replaces what it has sent by the mean of what all have sent,
and keeps what it has not sent in its own weights: it trains on with that, as in *Step-Ahead Error
Feedback* (Xu and Huang, AAAI 2021). So ``w_r - S`` is the residual. During warm-up own weights lose
a part of it with each exchange, ``w_r -= (1 - decay) (a_r - c_r)``, which keeps the ranks from
drifting apart.

The gradients of one rank are larger than their mean, because they are mostly noise. So an optimizer
that divides by the size of gradients, such as Adam, takes steps whose mean is too short. The gain
``f`` mends that. If ranks exchange after every step, each tensor has its own, which follows from
how far the ranks' gradients agree (:mod:`lightning_dct.sync.coherence`). Otherwise ``f = sqrt(W /
n)`` for an entry that ``n`` ranks (by node: nodes) have sent: the fewer have sent an entry, the
less the ranks agree on where it should move. If steps grow with their gradients, as those of SGD
do, ``f = 1`` and ``m`` is the step of DistributedDataParallel
(:mod:`lightning_dct.sync.optimizer_trial`). Decoupled weight decay is no update: ``S`` decays by
itself (:mod:`lightning_dct.sync.shared_decay`).

Sources: SPARQ-SGD (Singh et al., arXiv 1910.14280) and DiLoCo (Douillard et al., arXiv 2311.08105)
for compressed local steps; Streaming DiLoCo (Douillard et al., arXiv 2501.18512) for tensors that
take turns, and for exchanges that overlap with training.
"""

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import ClassVar
from weakref import ref

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_dct.agreement import check_alike
from lightning_dct.compress.bucket_plan import ExchangeContext, local_of, real_numel
from lightning_dct.config import DCTConfig
from lightning_dct.failures.collective_order import EXCHANGE
from lightning_dct.law import FEWEST_COUNTED, RunSettings
from lightning_dct.sync.coherence import Sample
from lightning_dct.sync.decision import Decision, decide
from lightning_dct.sync.masks import Masks
from lightning_dct.sync.optimizer_clock import MOST_IN_FLIGHT, OptimizerClock, buckets_of
from lightning_dct.sync.optimizer_state import DATA, Squares, may_be_averaged, squares_of
from lightning_dct.sync.optimizer_trial import try_out, warn_of_zeros
from lightning_dct.sync.row_gradients import average_rows, bytes_of_gradients
from lightning_dct.sync.shared_weights import as_real, start_alike
from lightning_dct.sync.update_state import UpdateState
from lightning_dct.wire.payload import tag_of

# After so many steps it is known whether ranks differ by more than noise.
FEWEST_JUDGED = 100


class UpdateSynchronizer(UpdateState):
    """Exchanges the updates of one rank's weights with the other ranks.

    Every optimizer has its own clock, which counts its steps, skipped ones included. A parameter
    takes part from the first step of its optimizer at which it is trainable. For the arguments see
    :class:`~lightning_dct.sync.update_state.UpdateState`.

    Attributes:
        run_settings: Chooses settings as the run goes on; None if they stay.
        project: Brings the weights in the model back into their bounds; None if they have none.
        may_skip: Whether a rank may skip a step by itself, as under a loss scaler; the same on all
            ranks.
        masks: Finds masks on this rank; None to compare nothing within training.
        rows: Parameters whose gradients may be sparse.
        takes_new_optimizers: Whether an optimizer may come that is not known from the start.
    """

    run_settings: RunSettings | None = None
    project: Callable[[], None] | None = None
    may_skip: bool = False
    masks: Masks | None = None
    rows: Collection[Tensor] = frozenset()
    takes_new_optimizers: ClassVar[bool] = True
    _has_warned: bool = False

    def before_step(self, optimizer: Optimizer) -> None:
        """Take the settings of a run of this length, and register parameters that are stepped for
        the first time.
        """
        if self.run_settings is not None:
            self._change(self.run_settings.config_after(self.fewest_steps))
        # A checkpoint that was made and not saved has left a view open.
        self.views.continue_training()
        clock = self.register(optimizer)
        step = clock.steps + 1
        if self.masks is not None and clock.names and self._is_first(clock):
            has_zeros = self.project is not None or clock.trial.sets_zeros  # without a mask
            self.masks.look(clock.steps, self.weights, () if has_zeros else clock.names)
        is_compared = clock.names if self.clips_by_norm else clock.buckets
        if is_compared and not self._alone and self._decide(clock, step).measures:
            clock.coherence.begin(step, self._compared_by_step(clock, optimizer))

    def begin_step(self, optimizer: Optimizer) -> None:
        """As :meth:`before_step`, where weights may be loaded until the first step; a collective
        call.
        """
        known = len(self.weights.parameters)
        self.before_step(optimizer)
        if len(self.weights.parameters) > known:
            new = [*self.weights.parameters][known:]
            number = self._number_of(optimizer)
            self.check_order(
                f"{self._clocks[number].digest} begins", f"the first step of {len(new)} parameters"
            )
            # Forward may have written other values on each rank, which count as updates of the
            # first rank's weights.
            start_alike(map(self.weights.shared, new), self.exchange.everyone.group)

    def register(self, optimizer: Optimizer) -> OptimizerClock:
        """Have the trainable parameters of an optimizer take part, and return its clock."""
        number = self._number_of(optimizer)
        clock = self._clocks[number] = self._clocks.get(number) or OptimizerClock()
        if clock.tried != (tried := (ref(optimizer), len(optimizer.param_groups))):
            clock.tried = tried
            clock.trial = try_out(optimizer)
            if clock.trial.sets_zeros and not self._alone:
                warn_of_zeros(optimizer)
        listed = [
            p for group in optimizer.param_groups for p in group["params"] if p not in clock.known
        ]
        # A frozen one is looked at once, because a checkpoint may have its weights.
        fresh = {p for p in listed if p.requires_grad or not clock.known}
        if not fresh:
            return clock
        if not (self._alone or clock.known) and fresh.isdisjoint(self._parameters()):
            rank_zero_warn(
                f"`{type(optimizer).__name__}` steps no parameter of the model, so nothing that it"
                " does is exchanged. If it holds copies of the weights, as in fp32 for weights of"
                " half precision, use `compress='gradients'`."
            )
        unknown = fresh - self.parameter_names.keys() - self._classified
        # Parameters outside the model are not synchronised, as under DistributedDataParallel.
        self._refuse([parameter for parameter in self._parameters() if parameter in unknown])
        # One that is frozen now took part before if a checkpoint has its weights.
        known = self.weights.parameters
        candidates = fresh & self.parameter_names.keys()
        new = {p for p in candidates if p.requires_grad or self.parameter_names[p] in known}
        self._classified |= unknown | new
        clock.known |= (fresh - candidates) | new
        if not new or self._alone:
            return clock
        self._check_overlap(clock, {self.parameter_names[p] for p in new})
        before = set(clock.names)
        parameters = self._parameters_by_name()
        # In the model's order, which is the same on every rank.
        clock.names = [
            name for name, parameter in parameters.items() if name in before or parameter in new
        ]
        self._choose_by_gradient(clock, optimizer)
        for name in clock.names:
            self.weights.adopt(name, parameters[name])
        clock.buckets = buckets_of(
            [(name, parameters[name]) for name in clock.by_update],
            self.config.local_steps if self.config.overlap_steps else 1,
        )
        clock.dense_entries = None
        clock.sparse = []
        clock.coherence.skip()
        shapes = [
            [(name, str(parameters[name].dtype), real_numel(parameters[name])) for name in b]
            for b in clock.buckets
        ]
        clock.digest = f"{EXCHANGE} {number} {zlib.crc32(repr(shapes).encode()):x}"
        added = (
            ", ".join(repr(name) for name in clock.names if name not in before) if before else ""
        )
        clock.description = f"an exchange of {len(clock.names)} parameters" + (
            f", {added[:200]} added" if added else ""
        )
        return clock

    def refuse_late(self, parameters: Iterable[Tensor]) -> None:
        """Refuse parameters that have come into the model since it was set up (ValueError): no
        exchange knows them.
        """
        late = set(self._parameters()) - self.parameter_names.keys() - self._classified
        self._refuse([] if self._alone else [one for one in parameters if one in late])

    def _choose_by_gradient(self, clock: OptimizerClock, optimizer: Optimizer) -> None:
        """Choose the parameters of which ranks exchange gradients before a step: those of rows that
        take part for the first time.

        That needs an exchange at each step, at which all ranks wait. The mean of updates is as good
        if steps grow with gradients.
        """
        others = {name for other in self._clocks.values() for name in other.by_gradient}
        config = self.config
        is_seen = getattr(type(optimizer).step, "hooked", False)
        exchanges = config.exchanges_every_step and not config.overlap_steps
        if is_seen and exchanges and clock.trial.is_scale_invariant and not self.may_skip:
            rows = {self.parameter_names[one] for one in self.rows if one in self.parameter_names}
            others |= rows - self.weights.parameters.keys()
        chosen = others.intersection(clock.names)
        # In the model's order, which is the same on every rank.
        clock.by_gradient = [name for name in clock.names if name in chosen]

    def average_gradients(self, optimizer: Optimizer) -> None:
        """Average the gradients that ranks exchange before a step; a collective call."""
        clock = self._clocks[self._number_of(optimizer)]
        everyone = self.exchange.everyone
        parameters = {name: self.weights.parameters[name] for name in clock.by_gradient}
        step = self.synchronisations + 1
        self.check_order(
            f"{EXCHANGE} of rows",
            f"an exchange of gradients of {len(parameters)} embeddings for optimizer step {step}",
        )
        everyone.count_dense(bytes_of_gradients(list(parameters.values()), everyone.size))
        if self.clips_by_norm:
            clock.own_gradients = {name: one.grad for name, one in parameters.items()}
        with self.traffic.timed("exchange", "seconds_waiting"):
            average_rows(parameters, self.config.value_format, everyone)
        clock.has_means = True

    def averages_gradients(self, optimizer: Optimizer) -> bool:
        """Whether ranks exchange gradients before a step that has begun."""
        return bool(self._clocks[self._number_of(optimizer)].by_gradient) and not self._alone

    def _check_overlap(self, clock: OptimizerClock, new: set[str]) -> None:
        """Refuse updates of one parameter that two optimizers have in flight at once."""
        others = {
            name for other in self._clocks.values() if other is not clock for name in other.names
        }
        if self.config.overlap_steps and (shared := sorted(new & others)):
            raise ValueError(
                f"Two optimizers step {shared[0]!r}, whose updates may then be in flight twice. Use"
                " `overlap_steps=0`."
            )

    def takes_part(self, parameter: Tensor) -> bool:
        """Whether a parameter is registered or known not to be exchanged."""
        return parameter in self._classified

    def follow(self, settings: RunSettings) -> None:
        """Take the settings of a run of some length, and follow them as it goes on."""
        self.run_settings = settings
        if self._counted:  # before it was resumed
            settings.expect(self._counted)
        self.plans.change(self._with_density(settings.config_after(self.fewest_steps)))

    def extrapolate_length(self, share: float) -> None:
        """Choose settings again if the steps in a share of the run are more or fewer than expected.

        All ranks call this after the same batch.
        """
        chosen = self.run_settings
        steps = self.fewest_steps
        if (
            chosen is not None
            and steps >= FEWEST_COUNTED
            and chosen.is_off(counted := round(steps / share))
        ):
            self._counted = counted
            chosen.expect(counted)
            self._change(chosen.config_after(steps))

    @property
    def fewest_steps(self) -> int:
        """The fewest steps that any optimizer has made, of those that have begun."""
        return min(
            (clock.steps for clock in self._clocks.values() if clock.exchanges and clock.steps),
            default=0,
        )

    def _change(self, config: DCTConfig) -> None:
        """Take settings for another length of the run, between two exchanges."""
        density = config.density if self.given_density is None else self.given_density
        if (config.local_steps, density) != (self.config.local_steps, self.config.density):
            counted = f", of about {self._counted:,} of each optimizer," if self._counted else ""
            rank_zero_info(
                f"After {self.fewest_steps:,} optimizer steps{counted} DCT takes"
                f" local_steps={config.local_steps}, density={density:g} for a run of this length."
            )
            self.plans.change(self._with_density(config))

    def after_step(self, optimizer: Optimizer, was_made: bool = True) -> None:
        """Count a step, apply updates that are due, and send the buckets that are due; a collective
        call.

        ``was_made`` is False for a step that a loss scaler has skipped.
        """
        clock = self._count_step(optimizer)
        config = self.config
        self._decay(clock, optimizer, was_made)
        self._share_own(clock, optimizer, was_made)
        if arrived := [item for item in clock.in_flight if item.due <= clock.steps]:
            if self.exchange.num_collectives > 1:  # the last of its collectives takes all ranks
                self.check_order(
                    f"{EXCHANGE} that ends",
                    f"the arrival of updates in optimizer step {self.synchronisations}",
                )
            self.flow.apply(clock, arrived)
        decision = self._decide(clock, clock.steps)
        length = decision.length
        sending = clock.due_buckets(length, takes_turns=bool(config.overlap_steps))
        if sending or (clock.by_gradient and decision.is_exchanged):
            own = (
                f", step {clock.steps} of optimizer {self._number_of(optimizer)}"
                if len(self._clocks) > 1
                else ""
            )
            name = clock.digest
            # A rank that has not clipped as the others have may measure nothing.
            if clock.coherence.has_begun(clock.steps):
                name = f"{name} with coherence"
            # It may wait for the others in the first steps.
            with self.traffic.timed("exchange", "seconds_waiting"):
                self.check_order(
                    name, f"{clock.description}{own}, in optimizer step {self.synchronisations}"
                )
            if self._measure(clock, optimizer, decision):
                # The measurement before is known from now on.
                decision = self._decide(clock, clock.steps)
            if self.may_skip and clock.decays:
                clock.own_decay.agree(clock.names, self.weights, self.exchange.everyone)
            tag = tag_of(clock.digest, clock.steps, self.epoch)
            context = ExchangeContext(
                tag,
                dropped=1.0 - decision.kept,
                gains=decision.gains(clock.coherence),
                gain=decision.gain(clock.coherence),
            )
            clock.holds_back = decision.holds_back
            self.exchange_buckets(clock, sending, length, context, self._to_select_anew(sending))
            if decision.averages_buffers:
                self._exchange_buffers_with(clock)
            self._average_squares(clock, optimizer, length)
            if clock.steps >= FEWEST_JUDGED:
                self._warn_if_unlike(clock)
            self._compare(clock)
        self.weights.project(self.project)
        self.feedback.awaited.poll()

    def exchange_buckets(
        self,
        clock: OptimizerClock,
        buckets: Sequence[Sequence[str]],
        length: int,
        context: ExchangeContext,
        selected_anew: Collection[str],
    ) -> None:
        """Send buckets and, unless they overlap with training, apply what arrives; a collective
        call.

        Args:
            clock: Of the optimizer whose step they follow.
            buckets: The names of their parameters.
            length: Optimizer steps since they were last sent.
            context: The tag, and factors.
            selected_anew: Parameters whose thresholds are selected anew.
        """
        overlaps = bool(self.config.overlap_steps)
        if selected_anew:
            self.thresholds.forget_those_of(selected_anew)
        self.feedback.begin()
        for bucket in buckets:
            clock.in_flight.append(self.flow.send(bucket, clock, length, context))
            behind = 0 if overlaps else sum([item.entries for item in clock.in_flight[1:]])
            if behind >= max(MOST_IN_FLIGHT, clock.in_flight[-1].entries):
                self.flow.apply(clock, clock.in_flight[:1])
        self.traffic.add(refreshes=int(self.feedback.selected))
        if not overlaps:
            self.flow.apply(clock, clock.in_flight)

    def _decay(self, clock: OptimizerClock, optimizer: Optimizer, was_made: bool) -> None:
        """Decay the shared weights as a step has decayed this rank's own, or note that for the next
        exchange.
        """
        if not clock.decays or not was_made:
            return
        if self.may_skip:
            clock.own_decay.after_step(optimizer, clock.trial.decays, self.parameter_names)
        else:
            clock.decay.after_step(
                optimizer, clock.trial.decays, self.parameter_names, self.weights
            )

    def _share_own(self, clock: OptimizerClock, optimizer: Optimizer, was_made: bool) -> None:
        """Take this rank's own weights for the shared ones after a step that all ranks have made
        alike.
        """
        if clock.by_gradient and was_made and not clock.has_means:
            raise RuntimeError(
                f"A step of `{type(optimizer).__name__}` was made without the mean of the sparse"
                f" gradients of {clock.by_gradient[0]!r}, because no hook has seen it begin. Call"
                " the optimizer's own `step()`, uncompiled, and have its closure run in it, or use"
                " `sparse=False`."
            )
        clock.has_means = False
        for name in clock.by_gradient:
            self.weights.share_own(name)

    def _average_squares(self, clock: OptimizerClock, optimizer: Optimizer, length: int) -> None:
        """Now and then give all ranks the same mean squares of gradients; a collective call."""
        squares = self._squares_due(clock, optimizer, clock.steps, length)
        if squares:
            device = self.weights.parameters[clock.names[0]].device
            with self.traffic.timed("exchange", "seconds_waiting"):
                clock.squares.average(squares, self.exchange.everyone, device)

    def _squares_due(
        self, clock: OptimizerClock, optimizer: Optimizer, step: int, length: int
    ) -> Mapping[str, Squares]:
        """This rank's squares of gradients, if all ranks average theirs after a step; else none."""
        if not self.config.share_second_moments or not may_be_averaged(step, length):
            return {}
        keys = clock.trial.squares_by_parameter(optimizer)
        parameters = self.weights.parameters
        having = {name: parameters[name] for name in clock.by_update if keys.get(parameters[name])}
        states = [local_of(parameter) for parameter in having.values() for _ in keys[parameter]]
        if not states or not self.flow.averages_squares(step, length, states, clock.buckets):
            return {}
        return squares_of(optimizer, having, keys)

    def _warn_if_unlike(self, clock: OptimizerClock) -> None:
        """Warn once if the ranks' gradients differ by more than noise: then a mean of their steps
        is not DDP's.
        """
        coherence = clock.coherence.mean
        persistence = clock.squares.persistence
        if self._has_warned or not (clock.coherence.are_opposed or persistence > DATA):
            return
        self._has_warned = True
        said = (
            f"their sizes deviate with a persistence of {persistence:.2f}, about 0 if data are"
            " alike"
        )
        if coherence is not None:
            said = f"coherence {coherence:.2f}, 1 or more if data are alike; {said}"
        rank_zero_warn(
            "The ranks seem to train on data of different kinds, each with its own classes, domain"
            f" or users: their gradients differ by more than noise ({said}). DCT corrects for that,"
            " but such a run may still end a few percent above plain DDP. Shuffle the data over"
            " the ranks if you can, and compare with `strategy='ddp'` if you cannot."
        )

    def _compare(self, clock: OptimizerClock) -> None:
        """Now and then compare what must be alike, so that what is not is told soon; a collective
        call.
        """
        if (
            self.masks is None
            or self._alone
            or not self._is_first(clock)
            or not self.masks.is_due(clock.steps)
        ):
            return
        self.check_order(
            f"{EXCHANGE} of checksums",
            f"a comparison of weights in optimizer step {self.synchronisations}",
        )
        shared, others = self._compared_tensors()
        check_alike(shared, others, self.peers, self.masks.found, self.exchange.everyone.group)
        self.masks.compared(clock.steps)

    def _compared_tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The shared weights, and the parameters that are not shared, by name."""
        shared = self.weights.seen()
        return shared, {
            name: local_of(p) for p, name in self.parameter_names.items() if name not in shared
        }

    def _is_first(self, clock: OptimizerClock) -> bool:
        """Whether this is the clock of the first optimizer that exchanges."""
        return (
            clock
            is self._clocks[
                min([number for number, other in self._clocks.items() if other.exchanges])
            ]
        )

    def _exchange_buffers_with(self, clock: OptimizerClock) -> None:
        """Exchange buffers when the first optimizer exchanges, or another one while the first
        rests.
        """
        if self._is_first(clock) or clock.since_buffers > self.config.local_steps:
            for other in self._clocks.values():
                other.since_buffers = 0
            self.buffers.exchange(
                lambda n: self.check_order(
                    f"{EXCHANGE} of {n} buffers", f"an exchange of {n} buffers"
                )
            )

    def _count_step(self, optimizer: Optimizer) -> OptimizerClock:
        """Count a step of an optimizer, and the bytes that DistributedDataParallel would have sent
        for it.
        """
        clock = self._clocks[self._number_of(optimizer)]
        everyone = self.exchange.everyone
        self.request_refresh_when_due()
        clock.steps += 1
        clock.since_buffers += 1
        self.synchronisations += 1
        self.steps_since_refresh += 1
        everyone.count_dense(clock.bytes_under_ddp(self.weights.parameters, everyone.size))
        self.traffic.add(steps=1)
        return clock

    def _decide(self, clock: OptimizerClock, step: int) -> Decision:
        """What follows a step of an optimizer."""
        return decide(
            step,
            self.config,
            is_scale_invariant=clock.trial.is_scale_invariant,
            clips_by_norm=self.clips_by_norm,
            is_ending=self.run_settings is not None and self.run_settings.is_ending(step),
            are_opposed=clock.coherence.are_opposed,
        )

    def _compared_by_step(self, clock: OptimizerClock, optimizer: Optimizer) -> dict[str, Tensor]:
        """Own weights of the parameters whose steps are compared, because no squares of their
        gradients are kept.
        """
        if not clock.trial.is_scale_invariant:
            return {}
        squares = clock.trial.squares_by_parameter(optimizer)
        parameters = self.weights.parameters
        by_step = [name for name in clock.by_update if not squares.get(parameters[name])]
        return {name: as_real(self.weights.own(name)) for name in by_step}

    def _samples(self, clock: OptimizerClock, optimizer: Optimizer) -> dict[str, Sample]:
        """What is compared of each parameter in the step just made: see
        :mod:`lightning_dct.sync.coherence`.
        """
        squares = clock.trial.squares_by_parameter(optimizer)
        samples = {}
        # The clipping of gradients that are averaged needs to know how far they agree, too.
        for name in clock.names if self.clips_by_norm else clock.by_update:
            parameter = self.weights.parameters[name]
            own = as_real(self.weights.own(name))
            gradient = clock.own_gradients.get(name, parameter.grad)
            if gradient is not None:
                gradient = as_real(local_of(gradient))
            memory = next(iter(squares.get(parameter, {}).values()), None)
            samples[name] = clock.coherence.sample(name, own, gradient, memory)
        clock.own_gradients = {}
        return samples

    def _measure(self, clock: OptimizerClock, optimizer: Optimizer, decision: Decision) -> bool:
        """Now and then measure how far gradients agree in the step just made, and agree on decay;
        collective calls. Whether there is a measurement.
        """
        everyone = self.exchange.everyone
        awaited = self.feedback.awaited
        measures = clock.coherence.has_begun(clock.steps)
        agrees_on_decay = decision.agrees_on_decay and clock.decays and not self.may_skip
        if measures or agrees_on_decay:
            with self.traffic.timed("exchange", "seconds_waiting"):
                if measures:
                    clock.coherence.measure(self._samples(clock, optimizer), everyone, awaited)
                if agrees_on_decay:
                    clock.decay.agree(clock.names, self.weights.parameters, everyone, awaited)
        return measures

    @torch.no_grad()
    def norm_of_mean(self, parameters: Iterable[Tensor]) -> Tensor:
        """About the norm of the mean of all ranks' gradients, from this rank's own: a scalar of
        fp32.

        A rank's gradient is longer than the mean by ``sqrt(W / R)``; see
        :mod:`lightning_dct.sync.coherence`. No collective call, but from now on coherence is
        measured for it.
        """
        self.clips_by_norm = True
        square = torch.zeros((), dtype=torch.float64)
        for parameter in parameters:
            if parameter.grad is None:
                continue
            gradient = local_of(parameter.grad)
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            own = torch.linalg.vector_norm(
                as_real(values), dtype=torch.promote_types(values.dtype, torch.float32)
            )
            square = square.to(own.device) + own.double().square() * self._share_of_mean(parameter)
        return square.sqrt().float()

    def _share_of_mean(self, parameter: Tensor) -> float:
        """The square of the mean gradient of a parameter, as a share of the ranks' own; 1 while it
        is not known.
        """
        name = self.parameter_names.get(parameter, "")
        ranks = self.exchange.everyone.size
        for clock in self._clocks.values():
            if name in clock.coherence.tensors:
                return clock.coherence.tensors[name].present(ranks) / ranks
        return 1.0

    def apply_all(self) -> None:
        """Wait for updates in flight and apply them, whether they are due or not; a collective
        call.
        """
        self.views.continue_training()
        for clock in [one for one in self._clocks.values() if one.in_flight]:
            self.flow.apply(clock, clock.in_flight)

    def warn_if_unsent(self) -> None:
        """Warn at the end of a run that has exchanged nothing yet."""
        steps = self.synchronisations
        others = self.exchange.everyone.size - 1
        if steps and others and not self.traffic.totals.entries:
            rank_zero_warn(
                f"This run has ended after {steps} optimizer steps, before its first exchange: the"
                " shared weights, which you see, have not changed. Lower `local_steps`"
                f" ({self.config.local_steps} here), or train for longer."
            )

    def forget_optimizer(self, number: int) -> None:
        """Apply the updates in flight of an optimizer that steps no more, and forget its clock; a
        collective call.
        """
        if (clock := self._clocks.pop(number, None)) is not None:
            self.views.continue_training()
            self.flow.apply(clock, clock.in_flight)

    def exchange_buffers(self) -> None:
        """Give every rank the same buffers; a collective call."""
        said = f"an exchange of buffers after {self.synchronisations} optimizer steps"
        self.buffers.exchange(lambda _: self.check_order("buffers", said))

    def check_parameters_alike(self) -> None:
        """Compare the parameters of all ranks; a collective call.

        See :func:`~lightning_dct.agreement.check_alike`.
        """
        # A rank without peers takes part, too.
        if self._clocks and dist.get_world_size() > 1:
            check_alike(*self._compared_tensors(), self.peers)

    def _to_select_anew(self, buckets: Iterable[Sequence[str]]) -> set[str]:
        """The parameters of buckets about to be sent whose thresholds are selected anew, because a
        refresh was requested since they were last sent.
        """
        if self.refresh_requested:
            self._to_refresh = set(self.weights.parameters)
            self.refresh_requested = False
            self.steps_since_refresh = 1
        if not self._to_refresh:
            return set()
        names = self._to_refresh & {name for bucket in buckets for name in bucket}
        self._to_refresh -= names
        return names

    def _number_of(self, optimizer: Optimizer) -> int:
        number = self.known.number_of(optimizer)
        if number is None:
            raise ValueError(
                f"An optimizer ({type(optimizer).__name__}) has made a step, but"
                " `configure_optimizers` did not return it. Return it there too, so that all ranks"
                " know when it steps."
            )
        return number
