"""Exchanges updates among the ranks that are present, and lets a rank catch up that has missed
some.

    present r      a_r = w_r - S,   c_r = the entries of a_r that reach a threshold         as in ``dct``
                   all-gather of a header: the step, the steps trained, the pace
                   all-gather of c_r and the buffers that have changed on a rank, then the vote
    committed      m = f / W * sum of c_r,   S += m,   w_r += m - c_r                       W: those that have sent

Decoupled weight decay is no update: senders tell by how much they have decayed, and the shared
weights decay by the mean (:class:`~lightning_dct.sync.shared_decay.OwnDecay`).

Nothing changes before the vote. So a rank that has failed before it is behind by this round and has
lost nothing: at its next meeting it takes the shared weights ``S'`` of a peer, and ``w_r += S' -
S``, less ``c_r`` if the others have added that. Between two exchanges ranks do not depend on each
other.

*Every rank has the same step.* A rank that has missed some passes over the steps up to that of the
others without training; a slow one does the same at the end of each round (skipped iterations: Luo
et al., *Hop*, ASPLOS 2019).
"""

import math
import time
import zlib
from collections import deque
from collections.abc import Mapping
from functools import reduce
from operator import or_
from statistics import median, mode
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_dct.compress.bucket_plan import (
    NO_CONTEXT,
    Bucket,
    BucketPlan,
    ExchangeContext,
    Gain,
    Received,
)
from lightning_dct.compress.codec import apply, decompress_own
from lightning_dct.elastic.present import PresentRanks
from lightning_dct.sync.buffers import PresentBuffers
from lightning_dct.sync.coherence import LEAST, coherence_of_all, shape_of
from lightning_dct.sync.decision import Decision, Length
from lightning_dct.sync.optimizer_clock import OptimizerClock
from lightning_dct.sync.optimizer_state import sums_as_bytes, sums_of
from lightning_dct.sync.shared_weights import IN_PLACE, as_real
from lightning_dct.sync.updates import FEWEST_JUDGED, UpdateSynchronizer
from lightning_dct.traffic import all_gather_bytes

# A rank as fast as this share of the median trains every step. Its time for a step is the median of
# its last steps: one in which it was stopped, or the first of a process, does not make it a slow
# rank.
AS_FAST = 0.75
LAST_STEPS = 32
# Attempts to meet the others before a rank leaves.
FAREWELLS = 3
# In a header.
HANDS_OVER = 2
# Rounds of which a rank knows in which quorum they were: one that has missed more starts with
# nothing held back.
REMEMBERED = 100
COSINE = "agreement of 0"
# Of a cosine of 1 in a header.
WHOLE = 1 << 20


class Header(NamedTuple):
    """The header that a rank sends before its payload, as int64.

    Attributes:
        rank: Its number among those that were asked for.
        step: Optimizer steps of the run, those passed over included; -1 of a rank that is joining.
        trained: Of these, how many it has trained since its last exchange.
        num_bytes: Bytes that it would send.
        nanoseconds: Its time for a step.
        ready: 1 if a joining rank starts with those that are there, or any other leaves;
            ``HANDS_OVER`` if it gives the others what it has not sent.
        cosine: The mean cosine that it takes the ranks' gradients to have, in parts of ``WHOLE``.
            That of the first rank that is not behind counts.
        history: A checksum of the rounds that its shared weights have taken, and of their quorums.
        buffers: A bit for each buffer that has changed since the last exchange.
        averaged: Bytes at the end of its payload that are sums of second moments, to be averaged.
    """

    rank: int
    step: int
    trained: int
    num_bytes: int
    nanoseconds: int
    ready: int = 0
    cosine: int = 0
    history: int = 0
    buffers: int = 0
    averaged: int = 0


def gather_headers(
    present: PresentRanks, own: Header, patience_s: float | None = None
) -> list[Header]:
    """The headers of all ranks of a meeting; empty if that has failed.

    The wait is that of ``PresentRanks.all_gather``.
    """
    gathered = present.all_gather(torch.tensor(own, dtype=torch.int64), patience_s)
    return [] if gathered is None else [Header(*row) for row in gathered.tolist()]


class ElasticUpdates(UpdateSynchronizer):
    """Exchanges the updates of one rank's weights with the ranks that are present.

    Attributes:
        due: Whether the next exchange is due.
        train_until: The step up to which this rank trains in this round.
        resume_at: The step of the others, if this rank is behind; it passes over those before.
        is_trained: Whether the step of this batch has been trained; None if the batch had none.
        passed_over: Steps that this rank has not trained.
        exchanges: Exchanges that this rank has taken part in.
        seconds_met: Time in meetings, in which this rank has waited for others.
        tallies: By rank, the steps trained and the exchanges taken part in.
    """

    present: PresentRanks
    buffers: PresentBuffers
    may_skip = True  # a rank may pass over steps
    takes_new_optimizers = False

    def __init__(self, *args: Any, rank: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.present = self.exchange.everyone.group  # type: ignore[assignment]
        self._rank = rank
        self._alone = False  # others may come
        self.peers = (0,)  # what is compared with all ranks is this rank's alone
        self.due = False
        self.is_trained: bool | None = None
        self.train_until = self.resume_at = 0
        self.passed_over = self.exchanges = self._trained = 0
        self.seconds_met = 0.0
        self._times: deque[float] = deque(maxlen=LAST_STEPS)
        self.tallies: dict[int, tuple[int, int]] = {}
        self._said: list[int] = []
        # Of all tensors together, in parts of `WHOLE`: the coherence of any number of ranks follows
        # from it.
        self._cosine = WHOLE
        self._round = 0
        # By round, the quorum in which this rank has committed it. And its payload of a round that
        # has failed.
        self._commits: deque[tuple[int, int]] = deque(maxlen=REMEMBERED)
        self._history = 0
        self._unsure: tuple[int, int, list[tuple[list[str], BucketPlan, Tensor]]] | None = None

    @property
    def step(self) -> int:
        """Optimizer steps of the run, those passed over included."""
        return self._the_clock.steps

    @property
    def trains(self) -> bool:
        """Whether this rank trains the next step, or passes over it."""
        return self.step >= self.resume_at and (
            not self.train_until or self.step < self.train_until
        )

    def begin_step(self, optimizer: Optimizer) -> None:
        """Begin a step, which may be passed over; no collective call."""
        self.is_trained = self.trains
        self.before_step(optimizer)

    def after_step(self, optimizer: Optimizer, was_made: bool = True) -> None:
        """Count a step; the exchange comes when the batch ends, where a checkpoint can be made for
        a joiner.
        """
        clock = self._count_step(optimizer)
        self._decay(clock, optimizer, was_made)
        if self.project is not None:
            self.project()  # this rank's own; the shared ones do not change here
        is_due = bool(clock.due_buckets(self.config.length_at(clock.steps), takes_turns=False))
        self.due = clock.steps > self.resume_at and is_due

    def add_step(self, trained: bool, seconds: float) -> None:
        """Count a step that was trained, in so many seconds, or was passed over."""
        self.is_trained = None
        self._trained += trained
        if trained:
            self._times.append(seconds)
        self.passed_over += not trained

    def exchange_updates(self) -> None:
        """Meet the others and exchange updates with them; nothing happens if that fails."""
        self.due = False
        began = time.monotonic()
        self.train_until = 0
        self._round = self.present.quorum_step
        self.views.continue_training()
        with self.traffic.timed("exchange", "seconds_waiting"):
            # A rank that is behind has the others' shared weights afterwards.
            met = self.present.start_quorum()
        if met:
            self._exchange()
        self.seconds_met += time.monotonic() - began

    def apply_all(self, ready: int = 1) -> None:
        """Meet the others once more before leaving: a rank that has missed the last exchange takes
        it from them.

        With ``HANDS_OVER`` this rank gives them what it has moved and not sent, because the run
        goes on without it.
        """
        self.views.continue_training()
        self._round = self.present.quorum_step
        header = Header(self._rank, self.step, 0, 0, 0, ready=ready, history=self._history)
        for _ in range(FAREWELLS):
            headers = gather_headers(self.present, header) if self.present.start_quorum() else []
            if headers and self._say_farewell(headers, ready):
                return

    def _say_farewell(self, headers: list[Header], ready: int) -> bool:
        """End a meeting without updates; return whether its end, and what ranks hand over, is
        taken.

        A joiner has the weights from before the meeting, so nothing changes if there is one. Then a
        rank tries again.
        """
        present = self.present
        givers = [place for place, header in enumerate(headers) if header.ready == HANDS_OVER]
        takes = (
            givers
            and min(header.step for header in headers) >= 0
            and len({one.history for one in headers}) == 1
        )
        rows = None
        if takes:
            names = self._the_clock.names
            nothing = torch.zeros(sum(self.weights.sizes[name] for name in names))
            left = self.weights.movement(names, torch.float32) if ready == HANDS_OVER else nothing
            rows = present.all_gather(left)
            self.exchange.everyone.count(all_gather_bytes(4 * left.numel(), present.size()))
        if not present.should_commit():
            return False
        if rows is not None:
            for row in rows[givers]:
                # As the mean of all ranks, of which only this one has moved.
                mean = row.nan_to_num_(0.0, 0.0, 0.0).div_(len(headers))
                self.weights.move(names, mean, nothing)
            self.weights.project(self.project)
        return rows is not None or ready < 2

    def _exchange(self) -> None:
        clock = self._the_clock
        present = self.present
        buckets = self._plans(clock, clock.steps)
        optimizer = self.known.all()[0]
        assert optimizer is not None  # Lightning holds it
        length = self.config.length_at(clock.steps)
        squares = self._squares_due(clock, optimizer, clock.steps, length)
        sums = sums_of(squares, torch.device("cpu"))
        averaged = sums_as_bytes(sums) if sums else torch.empty(0, dtype=torch.uint8)
        sampled = torch.empty(0)
        if clock.coherence.has_begun(clock.steps):
            sampled = torch.cat([one.entries for one in self._samples(clock, optimizer).values()])
            clock.coherence.skip()
        # Those of all buffers, of which ranks then send those that have changed on one of them.
        decayed = clock.own_decay.of(clock.names if clock.decays else ()).view(torch.uint8)
        compressed = sum(plan.layout.num_bytes for _, plan in buckets)
        num_bytes = decayed.numel() + compressed + self.buffers.num_bytes + sampled.nbytes
        num_bytes += averaged.numel()
        nanoseconds = int(1e9 * median(self._times or (0.0,)))
        shared = {
            "cosine": self._cosine,
            "history": self._history,
            "buffers": self.buffers.changed(),
            "averaged": averaged.numel(),
        }
        header = Header(self._rank, clock.steps, self._trained, num_bytes, nanoseconds, **shared)
        with self.traffic.timed("exchange", "seconds_waiting"):
            headers = gather_headers(present, header)
        if not headers:
            present.should_commit()  # that the meeting has failed
            return
        histories = [header.history for header in headers if header.step >= 0 and not header.ready]
        if len(histories) < len(headers) or len(set(histories)) > 1:
            # A joiner has the weights from before this exchange, so all keep what they would send.
            # A rank that leaves has none to send. Ranks that have met others in rounds of the same
            # number take the weights of the most.
            apart = self._history != mode(histories)
            if self._say_farewell(headers, ready=0):
                self.commit()
                if apart:
                    present.invalidate()
            return
        step = max(header.step for header in headers)
        own = headers[present.rank()]
        sizes = {header.num_bytes for header in headers if header.step == step}
        if len(sizes) > 1:
            raise ValueError(
                "The ranks send different things ("
                + ", ".join(f"rank {h.rank}: {h.num_bytes} bytes" for h in headers)
                + "). Use the same model, settings and version of lightning_dct on every rank."
            )
        if (
            own.step < step
            # a rank that is behind reads what the others send with the settings that they have by
            # now
        ):
            self._choose_settings(step)
            buckets = self._plans(clock, step)
        senders = [
            place
            for place, header in enumerate(headers)
            if header.step == step and header.trained > 0
        ]
        changed = reduce(or_, [headers[place].buffers for place in senders], 0)
        uncompressed = self.buffers.to_bytes(changed)
        size = sizes.pop() - self.buffers.num_bytes + uncompressed.numel()
        sent = torch.zeros(size, dtype=torch.uint8)
        payloads = []
        self.feedback.begin()
        if sends := present.rank() in senders:
            anew = self._to_select_anew([names for names, _ in buckets])
            self.thresholds.forget_those_of(anew)
            with clock.own_decay.in_shared(clock.names, self.weights):
                payloads = [self._compress(names, plan) for names, plan in buckets]
            parts_sent = [decayed, *payloads, uncompressed, sampled.view(torch.uint8), averaged]
            sent = torch.cat(parts_sent)
        self.traffic.add(bytes_of_buffers=all_gather_bytes(uncompressed.numel(), present.size()))
        self.exchange.everyone.count(all_gather_bytes(size, present.size()))
        this_round = present.quorum_step
        quorum = present.quorum
        with self.traffic.timed("exchange", "seconds_waiting"):
            rows = present.all_gather(sent)
            agreed = present.should_commit()
        if not agreed or rows is None:
            parts = [(*bucket, payload) for bucket, payload in zip(buckets, payloads, strict=sends)]
            self._unsure = (this_round, quorum, parts) if sends else None
            if own.step < step:  # the next exchange may be with others that are behind, too
                self._choose_settings(own.step)
            return
        self.commit()
        self._cosine = next(header.cosine for header in headers if header.step == step)
        if senders:
            decision = self._decide(clock, step)
            gain = None if decision.mean is Length.BY_SENDERS else 1.0
            context = ExchangeContext(gains=self._gains(decision, len(senders)), gain=gain)
            place = senders.index(present.rank()) if sends else None
            num_averaged = headers[senders[0]].averaged
            rest, of_squares = rows[senders].split([size - num_averaged, num_averaged], dim=1)
            self._take(buckets, self._decay_as_agreed(rest), place, changed, context)
            if place is not None and squares and len(senders) > 1:
                clock.squares.take(squares, sums, of_squares.contiguous(), place)
                if clock.steps >= FEWEST_JUDGED:
                    self._warn_if_unlike(clock)
        if own.step < step:
            self.resume_at = step
        self._note(headers, step)
        self._trained = 0

    def _decay_as_agreed(self, rows: Tensor) -> Tensor:
        """Decay the shared weights by the mean of what the senders' rows begin with; return the
        rest of the rows.
        """
        clock = self._the_clock
        if not clock.decays:
            return rows
        size = clock.own_decay.of(clock.names).nbytes
        factors = rows[:, :size].contiguous().view(torch.float64)
        same = (factors == factors[0]).all(0)  # a mean of equal numbers may be another one
        clock.own_decay.take(
            clock.names, torch.where(same, factors[0], factors.mean(0)).tolist(), self.weights
        )
        return rows[:, size:]

    def _take(
        self,
        buckets: list[tuple[list[str], BucketPlan]],
        rows: Tensor,
        own: int | None,
        changed: int,
        context: ExchangeContext,
    ) -> None:
        """Add what the senders have sent, ``[senders, bytes]``; ``own`` is this rank's row,
        ``changed`` the buffers.
        """
        clock = self._the_clock
        start = 0
        decay = self._decide(clock, clock.steps).kept
        with self.traffic.timed("apply"):
            for names, plan in buckets:
                stop = start + plan.layout.num_bytes
                received = Received(
                    rows[:, start:stop], plan, 1.0 / len(rows), own, context=context
                )
                start = stop
                bucket = self._in_place(names)
                apply(self.feedback, received, bucket)
                if own is not None and decay < 1.0:
                    torch._foreach_lerp_(list(bucket.inputs), list(bucket.references), 1.0 - decay)
            self.weights.project(self.project)
            rest = self.buffers.take(rows[:, start:], changed)
            if rest.numel() and len(rows) > 1:
                coherence = coherence_of_all(rest.view(torch.float32))
                if coherence is not None:
                    measured = round(WHOLE * (coherence - 1.0) / (len(rows) - 1))
                    self._cosine = (self._cosine + measured) // 2
        self.feedback.awaited.poll()
        self.exchanges += 1

    def _gains(self, decision: Decision, ranks: int) -> Mapping[str, Gain]:
        """One gain for all parameters, because the number of ranks changes."""
        clock = self._the_clock
        if not decision.mean.is_measured:
            return {}
        coherence = max(1.0 + (ranks - 1) * self._cosine / WHOLE, LEAST)
        one = torch.ones(1, dtype=torch.float64)
        gain = math.sqrt(ranks / coherence)
        gains = {}
        for name in clock.names:
            rows, columns = shape_of(as_real(self.weights.own(name)))
            gains[name] = Gain(torch.full((rows * columns,), gain, dtype=torch.float64), one)
        return gains

    def _share_of_mean(self, parameter: Tensor) -> float:
        ranks = max(self.exchange.everyone.size, 1)
        return max(1.0 + (ranks - 1) * self._cosine / WHOLE, LEAST) / ranks

    def state_dict(self) -> dict[str, Any]:
        """The base class's, and the ranks' cosine."""
        state = super().state_dict()
        state["exchange_clocks"][COSINE] = self._cosine + WHOLE
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        clocks = dict(state.get("exchange_clocks", {}))
        self._cosine = clocks.pop(COSINE, 2 * WHOLE) - WHOLE
        super().load_state_dict({**state, "exchange_clocks": clocks})

    def commit(self) -> None:
        """Note that this rank has taken the round that has ended."""
        latest = self.present.quorum_step - 1, self.present.quorum
        self._commits.append(latest)
        self._history = zlib.crc32(repr(latest).encode(), self._history)

    def _compress(self, names: list[str], plan: BucketPlan) -> Tensor:
        with self.traffic.timed("compress"):
            return self.exchange.compress(
                self.feedback, self._in_place(names), plan, set(), NO_CONTEXT, due=sum(plan.sizes)
            )

    def _in_place(self, names: list[str]) -> Bucket:
        bucket = self.weights.bucket(names)
        assert bucket is not None  # others are refused
        return bucket

    def _choose_settings(self, step: int) -> None:
        """Take the settings in which ranks at this step have made it."""
        if self.run_settings is not None:
            self._change(self.run_settings.config_after(step - 1))

    def _plans(self, clock: OptimizerClock, step: int) -> list[tuple[list[str], BucketPlan]]:
        length = self.config.length_at(step)
        return [(names, self.flow.plan(names, length)) for names in clock.buckets]

    # A joiner, and a rank that is behind.

    def give(self) -> dict[str, Any]:
        """The state that a rank which is behind or joins needs beside the checkpoint."""
        known = {"commits": list(self._commits), "history": self._history}
        return {"step": self.step, "buffers": dict(self.buffers.agreed), **known}

    def catch_up(self, given: Mapping[str, Any]) -> None:
        """Take a peer's shared weights, and keep what this rank has moved and the peers have not
        added.
        """
        self.views.continue_training()
        commits = dict(given["commits"])
        kept = self._round in commits
        added = self._unsure
        if added is not None and commits.get(added[0]) == added[1]:
            for names, plan, payload in added[2]:
                received = Received(payload.unsqueeze(0), plan, 1.0, own=0)
                own = payload.new_empty(sum(plan.sizes), dtype=plan.residual_dtype)
                self.weights.add_own(names, decompress_own(self.feedback, received, own), -1.0)
        self._unsure = None
        for name, shared in given["shared"].items():
            if name not in self.weights.parameters:
                continue
            base = self.weights.shared(name)
            own = self.weights.own(name)
            # As the peers' have decayed.
            base.mul_(self._the_clock.own_decay.factors.pop(name, 1.0))
            own.add_(shared - base) if kept else own.copy_(shared)
            base.copy_(shared)
        self.resume_at = max(self.resume_at, int(given["step"]))
        self.note_peer(given)

    def note_peer(self, given: Mapping[str, Any]) -> None:
        """Take what a peer knows of earlier rounds."""
        self._commits = deque(given["commits"], maxlen=REMEMBERED)
        self._history = given["history"]
        self.buffers.agreed = {name: buffer.clone() for name, buffer in given["buffers"].items()}

    # What the ranks have done.

    def _note(self, headers: list[Header], step: int) -> None:
        """Count what the ranks have done, and decide how many steps this one trains until the next
        exchange.
        """
        for header in headers:
            trained, exchanges = self.tallies.get(header.rank, (0, 0))
            self.tallies[header.rank] = trained + header.trained, exchanges + 1
        ranks = sorted(header.rank for header in headers)
        if ranks != self._said:
            self._said = ranks
            rank_zero_info(
                f"After {step:,} optimizer steps {len(ranks)} ranks are present: {ranks}."
            )
        paces = sorted(header.nanoseconds for header in headers if header.nanoseconds)
        own = headers[self.present.rank()].nanoseconds
        length = self.config.local_steps
        if (
            own
            and step >= self.config.warmup_steps
            and own * AS_FAST > (usual := paces[(len(paces) - 1) // 2])
        ):
            self.train_until = step + max(1, round((length - step % length) * usual / own))

    @property
    def _the_clock(self) -> OptimizerClock:
        return self._clocks.setdefault(0, OptimizerClock())


def refuse_not_in_place(names: Mapping[Tensor, str]) -> None:
    """Refuse parameters that cannot be exchanged in place (ValueError)."""
    for parameter, name in names.items():
        is_in_place = parameter.dtype in IN_PLACE and parameter.is_cpu and parameter.is_contiguous()
        if parameter.requires_grad and not is_in_place:
            layout = "" if parameter.is_contiguous() else ", and not contiguous"
            raise ValueError(
                "`strategy='dct_elastic'` exchanges contiguous parameters of float32 or float64 on"
                f" the CPU, and {name!r} is {parameter.dtype} on {parameter.device}{layout}. Use"
                " `strategy='dct'`, or a mixed precision, which keeps weights in float32, and"
                " `parameter.data.contiguous()`."
            )
