"""The state behind DDP's communication hook, and how it goes from one synchronisation to the next."""

# No `from __future__ import annotations` here: DistributedDataParallel compares the hook's annotations with classes.

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from lightning_dct.config import DCTConfig
from lightning_dct.gradients.correction import MomentumCorrection, MomentumSettings
from lightning_dct.gradients.exchanges import Bucket, Exchange
from lightning_dct.gradients.exchanges.base import send_sparse, send_whole, unused
from lightning_dct.gradients.holding import Holding
from lightning_dct.gradients.memory import Memory
from lightning_dct.gradients.pending import Pending, future_for
from lightning_dct.gradients.plan import BucketPlan
from lightning_dct.gradients.plans import Plans
from lightning_dct.gradients.weight_sizes import WeightSizes
from lightning_dct.traffic import FP32_BYTES, all_reduce_bytes, bytes_between_nodes


class GradientSynchronizer:
    """Synchronises the gradients of one rank with the others': the state behind a DDP communication hook.

    A *synchronisation* is one pass over all buckets, one for each optimizer step whatever the number of
    micro-batches. Everything remembered from one to the next is kept by parameter name.

    Args:
        config: The settings.
        parameter_names: The name of every parameter that may turn up in a bucket.
        exchange: How compressed gradients get to the other ranks; its ranks are the ones that take part.
        hold_unused: Keep the residual of a tensor that this rank's backward did not use instead of sending from it.
            With ``find_unused_parameters`` DDP throws the result for a globally unused parameter away; what had been
            sent for it would be lost.
        loss_scale: Gives the factor by which mixed-precision training has scaled the gradients; None when it does
            not. With it, a synchronisation that ends in an infinite or NaN gradient is undone, because the scaler
            skips that optimizer step.
        correction: Knows the momentum that is applied to gradients before they are compressed; None to apply none.
    """

    def __init__(
        self,
        config: DCTConfig,
        parameter_names: Mapping[Tensor, str],
        exchange: Exchange,
        hold_unused: bool = False,
        loss_scale: Callable[[], float] | None = None,
        correction: MomentumCorrection | None = None,
    ) -> None:
        self.plans = Plans(config, exchange.passes)
        self.exchange = exchange
        self.correction = correction
        if correction is not None:
            correction.take_charge_of(parameter_names)
        self.traffic = exchange.everyone.traffic
        self.memory = Memory(exchange.pieces, config.guard, loss_scale is not None, config.kernel)
        self.thresholds, self.residuals = self.memory.thresholds, self.memory.residuals
        self.synchronisations = 0
        self.steps_since_refresh = 0
        self.parameter_names = parameter_names
        self._weight_sizes = WeightSizes(config.refresh_every)
        self._hold_unused = hold_unused
        self._loss_scale = loss_scale
        self.refresh_requested = False
        self.holding: Holding | None = None
        # What follows belongs to the synchronisation under way.
        self._pending: list[Pending] = []
        self._refreshing = False
        self._momenta: dict[Tensor, MomentumSettings] = {}

    @property
    def config(self) -> DCTConfig:
        """The settings of the moment."""
        return self.plans.config

    @property
    def warming_up(self) -> bool:
        """Whether the next synchronisation belongs to warm-up."""
        return self.synchronisations < self.config.warmup_steps

    @property
    def holds_back(self) -> bool:
        """Whether the next synchronisation sends nothing."""
        return self.holding is not None and self.holding.back

    def request_refresh(self) -> None:
        """Select all thresholds anew in the next synchronisation."""
        self.refresh_requested = True

    def set_density(self, density: float) -> None:
        """Send another share of the entries from the next synchronisation on, where no other setting names a parameter.

        Every rank has to do so between the same two synchronisations. Thresholds that no longer apply are selected
        anew. It is not saved: who changes the density does so again after a restart, as the callbacks do.

        Args:
            density: As ``DCTConfig.density``.
        """
        self.check_idle()
        self.plans.change(replace(self.config, density=density))

    def scale_densities(self, factors: Mapping[str, float]) -> None:
        """Multiply the densities of some parameters, by name; as :meth:`set_density` in all else.

        Args:
            factors: Replaces what was set before. A density does not grow beyond 1.
        """
        self.check_idle()
        self.plans.scale(factors)

    def hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """The communication hook for ``DistributedDataParallel.register_comm_hook``.

        Args:
            state: Not used.
            bucket: Gradients that are ready. DDP hands the buckets over in the same order on every rank, each as
                soon as backward has filled it, so its bytes travel while backward goes on.

        Returns:
            A future of the bucket's averaged gradients.
        """
        if self.holding is not None:
            self.holding.measure(bucket.buffer())
            if self.holding.back:
                return self._hold_back(bucket, self.holding)
        if not self._pending:
            self._begin()
        earlier = [pending for pending in self._pending if pending.rounds_left > 1]
        with self.traffic.timed("compress"):
            self._pending.append(self._send(bucket))
        future = self._pending[-1].future
        # Now that this bucket is on its way, the ones before it begin their next round. That is decided by counting
        # and never by what has arrived: every rank has to start the same collectives in the same order.
        for pending in earlier:
            pending.advance(self.traffic, self._loss_scale is not None)
        if bucket.is_last():
            self._finish()
        return future

    def density_of(self, parameters: Iterable[Tensor]) -> float:
        """The share of the entries of some parameters' gradients that the next synchronisation sends, in (0, 1].

        What is not synchronised here counts as sent.
        """
        entries, sent = 0, 0
        for parameter in parameters:
            name, size = self.parameter_names.get(parameter), parameter.numel()
            plan = None if name is None else self.plans.of((name,), (size,), parameter.dtype, self.synchronisations)
            entries += size
            sent += size if plan is None else plan.targets[0] or size
        return sent / max(entries, 1)

    def weight_size_of(self, parameters: Iterable[Tensor]) -> float:
        """How large the weights of some parameters are; see :class:`~lightning_dct.gradients.weight_sizes.WeightSizes`.

        Of what is synchronised here; 0 where nothing is.
        """
        named = {self.parameter_names[p]: p for p in parameters if p in self.parameter_names}
        return self._weight_sizes.of(named, self.synchronisations)

    def check_optimizers(self, others: Collection[Tensor] = ()) -> None:
        """Refuse optimizers whose momentum cannot be corrected, where it is to be.

        Args:
            others: Trained parameters that are not synchronised here.

        Raises:
            ValueError: With the setting and the remedy.
        """
        if self.correction is not None:
            self.correction.settings(others)

    def flush(self) -> None:
        """Wait for what GPUs have still to tell: then all sent entries are counted and all payloads were sound.

        Raises:
            PayloadError: Something that has arrived was not what a rank can have sent; the message names the rank.
        """
        self.memory.awaited.wait()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plain numbers, dicts and CPU tensors. Flushes first."""
        self.flush()
        return {
            "synchronisations": self.synchronisations,
            "steps_since_refresh": self.steps_since_refresh,
            **self.memory.state_dict(),
            "weight_sizes": self._weight_sizes.state_dict(),
            "traffic": self.traffic.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ValueError: A saved residual has another size than the parameter of its name.
        """
        self.flush()
        if self.correction is None:
            state = {**state, "velocities": {}}
        self.memory.load_state_dict(
            state, {name: parameter.numel() for parameter, name in self.parameter_names.items()}
        )
        self.synchronisations = int(state["synchronisations"])
        self.steps_since_refresh = int(state["steps_since_refresh"])
        self._weight_sizes.load_state_dict(state.get("weight_sizes", {}))
        self.traffic.load_state_dict(state["traffic"])

    def check_idle(self) -> None:
        """Refuse changes in the middle of a synchronisation.

        Raises:
            RuntimeError: One is under way.
        """
        if self._pending:
            raise RuntimeError("A synchronisation is under way: change its settings before backward or after it.")

    def _hold_back(self, bucket: GradBucket, holding: Holding) -> Future[Tensor]:
        """Send nothing: what the optimizer would step with is zeros, and the strategy sees to it that it does not."""
        with self.traffic.timed("compress"):
            buffer, parameters = bucket.buffer(), bucket.parameters()
            plan = self._plan_of(buffer, parameters)
            held = self._held(buffer, plan, parameters)
            momenta = {} if self.correction is None else self.correction.settings()
            self.memory.add_momentum(buffer, plan, held, [momenta.get(parameter) for parameter in parameters])
            self.memory.hold_back(buffer, plan, held)
            self.traffic.add(entries=buffer.numel())
            self._count_dense(buffer)
        if bucket.is_last():
            self.traffic.add(steps=1)
            holding.in_a_row += 1
        future = future_for(buffer)
        future.set_result(buffer.zero_())
        return future

    def _begin(self) -> None:
        self._refreshing = self.refresh_requested
        if self.correction is not None:
            self._momenta = self.correction.settings()
        self.memory.begin(1.0 if self._loss_scale is None else 1.0 / self._loss_scale(), self._refreshing)

    def _finish(self) -> None:
        """Bring all buckets home, one round of all of them after the other: one is read while the next one travels.

        This happens here, in the thread that runs backward, and not in callbacks of the futures: gloo would run those
        in threads of its own, which compete with backward for the interpreter and can abort the process when it ends.
        """
        while under_way := [pending for pending in self._pending if pending.rounds_left]:
            for pending in under_way:
                pending.advance(self.traffic, self._loss_scale is not None)
        self.memory.awaited.look()
        # What the scaler will look for. Every rank holds the same means, so all come to the same answer.
        nonfinite = self._loss_scale is not None and not all(pending.finite for pending in self._pending)
        self.traffic.add(steps=1)
        if nonfinite:
            # The scaler skips this optimizer step, and so do we. A refresh that was due is due again.
            self.memory.roll_back()
        else:
            self.synchronisations += 1
            self.steps_since_refresh = 1 if self._refreshing else self.steps_since_refresh + 1
            self.traffic.add(refreshes=int(self.memory.selected))
            self.refresh_requested = False
            self.memory.commit()
        if self.holding is not None:
            self.holding.in_a_row = 0
        self._pending = []

    def _send(self, bucket: GradBucket) -> "Pending":
        buffer = bucket.buffer()
        momenta = [self._momenta.get(parameter) for parameter in bucket.parameters()]
        if buffer.is_sparse:
            if any(momenta):
                raise ValueError(
                    "`momentum='correct'` does not work with sparse gradients. Put the parameters of"
                    " `Embedding(sparse=True)` into a group of the optimizer with momentum=0, or use `momentum='keep'`."
                )
            return Pending(send_sparse(buffer, self.exchange.everyone), 1, buffer)
        parameters = bucket.parameters()
        plan = self._plan_of(buffer, parameters)
        self._count_dense(buffer)
        held = self._held(buffer, plan, parameters)
        self.memory.add_momentum(buffer, plan, held, momenta)
        ready = Bucket(buffer, plan, held)
        if plan.is_dense:
            return Pending(send_whole(ready, self.memory, self.exchange.everyone), 1, buffer)
        return Pending(self.exchange.send(ready, self.memory), self.exchange.rounds, buffer)

    def _plan_of(self, buffer: Tensor, parameters: list[Tensor]) -> BucketPlan:
        names = [self.parameter_names[parameter] for parameter in parameters]
        sizes = [parameter.numel() for parameter in parameters]
        return self.plans.of(names, sizes, buffer.dtype, self.synchronisations)

    def _count_dense(self, buffer: Tensor) -> None:
        everyone = self.exchange.everyone
        dense_bytes = all_reduce_bytes(FP32_BYTES * buffer.numel(), everyone.size)
        self.traffic.add(bytes_dense=bytes_between_nodes(dense_bytes, everyone.size, everyone.ranks_per_node))

    def _held(self, buffer: Tensor, plan: BucketPlan, parameters: list[Tensor]) -> set[int]:
        """Which tensors of a bucket this rank's backward did not use.

        DDP fills in zeros for them, or, for parameters switched off as ``toggle_optimizer`` does, whatever gradient
        an earlier backward has left.
        """
        if not self._hold_unused:
            return set()
        switched_off = {index for index, parameter in enumerate(parameters) if not parameter.requires_grad}
        return switched_off | unused(buffer, plan)
