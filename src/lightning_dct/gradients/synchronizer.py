"""The state behind DDP's communication hook, and how it goes from one synchronisation to the next."""

# No `from __future__ import annotations` here: DistributedDataParallel compares the hook's annotations with classes.

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from lightning_dct.config import DCTConfig
from lightning_dct.gradients.compression import compress, decompress
from lightning_dct.gradients.exchange import all_gather_payload, all_reduce_mean, all_reduce_mean_sparse
from lightning_dct.gradients.plan import BucketPlan, plan_bucket
from lightning_dct.gradients.residual import Residuals
from lightning_dct.threshold import Observed, Thresholds
from lightning_dct.traffic import FP32_BYTES, Traffic, all_reduce_bytes


class GradientSynchronizer:
    """Synchronises the gradients of one rank with the others': the state behind a DDP communication hook.

    A *synchronisation* is one pass over all buckets, one for each optimizer step whatever the number of
    micro-batches. Everything remembered from one to the next is kept by parameter name.

    Args:
        config: The settings.
        parameter_names: The name of every parameter that may turn up in a bucket.
        group: The ranks that take part.
        traffic: Where bytes and time are counted.
        hold_unused: Keep the residual of a tensor that this rank's backward did not use instead of sending from it.
            With ``find_unused_parameters`` DDP throws the result for a globally unused parameter away; what had been
            sent for it would be lost.
        loss_scale: Gives the factor by which mixed-precision training has scaled the gradients; None when it does
            not. With it, a synchronisation that ends in an infinite or NaN gradient is undone, because the scaler
            skips that optimizer step.
    """

    def __init__(
        self,
        config: DCTConfig,
        parameter_names: Mapping[Tensor, str],
        group: dist.ProcessGroup,
        traffic: Traffic,
        hold_unused: bool = False,
        loss_scale: Callable[[], float] | None = None,
    ) -> None:
        self.config = config
        self.traffic = traffic
        self.thresholds = Thresholds()
        self.residuals = Residuals()
        self.synchronisations = 0
        self.steps_since_refresh = 0
        self._parameter_names = parameter_names
        self._group = group
        self._hold_unused = hold_unused
        self._loss_scale = loss_scale
        self._refresh_requested = False
        self._plans: dict[tuple[str, ...], tuple[int, BucketPlan]] = {}
        # What follows belongs to the synchronisation under way.
        self._pending: list[_Pending] = []
        self._refreshing = False
        self._selected = False
        self._gradient_scale = 1.0
        self._observed: list[Observed] = []
        self._undo: list[tuple[Tensor, Tensor]] = []
        self._undo_thresholds: dict[str, Any] = {}

    def request_refresh(self) -> None:
        """Select all thresholds anew in the next synchronisation."""
        self._refresh_requested = True

    def hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """The communication hook for ``DistributedDataParallel.register_comm_hook``.

        Args:
            state: Not used.
            bucket: Gradients that are ready. DDP hands the buckets over in the same order on every rank, each as
                soon as backward has filled it, so its bytes travel while backward goes on.

        Returns:
            A future of the bucket's averaged gradients.
        """
        with self._timed():
            if not self._pending:
                self._begin()
            self._pending.append(self._send(bucket))
        future = self._pending[-1].future
        if bucket.is_last():
            self._finish()
        return future

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plain numbers, dicts and CPU tensors."""
        return {
            "synchronisations": self.synchronisations,
            "steps_since_refresh": self.steps_since_refresh,
            "thresholds": self.thresholds.state_dict(),
            "residuals": self.residuals.state_dict(),
            "traffic": self.traffic.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ValueError: A saved residual has another size than the parameter of its name.
        """
        sizes = {name: parameter.numel() for parameter, name in self._parameter_names.items()}
        for name, residual in state["residuals"].items():
            if residual.numel() != sizes.get(name, residual.numel()):
                raise ValueError(
                    f"The checkpoint's residual of parameter {name!r} has {residual.numel()} entries, the model's"
                    f" parameter has {sizes[name]}. Resume with the model that was saved."
                )
        self.synchronisations = int(state["synchronisations"])
        self.steps_since_refresh = int(state["steps_since_refresh"])
        self.thresholds.load_state_dict(state["thresholds"])
        self.residuals.load_state_dict(state["residuals"])
        self.traffic.load_state_dict(state["traffic"])

    def _begin(self) -> None:
        self._selected = False
        if self._loss_scale is not None:
            self._gradient_scale = 1.0 / self._loss_scale()
            self._undo_thresholds = self.thresholds.state_dict()
        self._refreshing = self._refresh_requested
        if self._refreshing:
            # Each is selected anew when its tensor next takes part: in this synchronisation, or later for a tensor
            # that belongs to another optimizer.
            self.thresholds.forget()

    def _finish(self) -> None:
        """Wait for all buckets in turn, reading one while the next one's bytes travel.

        This happens here, in the thread that runs backward, and not in callbacks of the futures: gloo would run those
        in threads of its own, which compete with backward for the interpreter and can abort the process when it ends.
        """
        nonfinite = False
        for pending in self._pending:
            pending.work.wait()
            with self._timed():
                mean = pending.read()
                # What the scaler will look for. Every rank holds the same mean, so all come to the same answer.
                nonfinite |= self._loss_scale is not None and not bool(_entries(mean).isfinite().all())
            pending.future.set_result(mean)
        self.traffic.add(steps=1)
        if nonfinite:
            # The scaler skips this optimizer step, and so do we. A refresh that was due is due again.
            for residual, before in self._undo:
                residual.copy_(before)
            self.thresholds.load_state_dict(self._undo_thresholds)
        else:
            self.synchronisations += 1
            self.steps_since_refresh = 1 if self._refreshing else self.steps_since_refresh + 1
            self.traffic.add(refreshes=int(self._selected))
            self._refresh_requested = False
            if self.config.guard:
                self.thresholds.guard(self._observed)
        self._pending, self._undo, self._observed = [], [], []

    def _send(self, bucket: GradBucket) -> "_Pending":
        buffer = bucket.buffer()
        if buffer.is_sparse:
            return _Pending(all_reduce_mean_sparse(buffer, self._group, self.traffic), lambda: buffer, _future(buffer))
        plan = self._plan(bucket)
        dense_bytes = all_reduce_bytes(FP32_BYTES * buffer.numel(), self._group.size())
        self.traffic.add(bytes_dense=dense_bytes, entries=buffer.numel())
        held = self._held(buffer, plan, bucket.parameters())
        if plan.is_dense:
            return self._send_whole_bucket(buffer, plan, held)
        return self._send_entries(buffer, plan, held)

    def _plan(self, bucket: GradBucket) -> BucketPlan:
        parameters = bucket.parameters()
        names = tuple(self._parameter_names[parameter] for parameter in parameters)
        stage = self.config.warmup_stage(self.synchronisations)
        if names not in self._plans or self._plans[names][0] != stage:
            plan = plan_bucket(
                names,
                [parameter.numel() for parameter in parameters],
                [self.config.density_of(name, stage) for name in names],
                bucket.buffer().dtype,
                self.config.value_format,
                self.config.min_tensor_size,
                self._group.size(),
            )
            self._plans[names] = (stage, plan)
        return self._plans[names][1]

    def _held(self, buffer: Tensor, plan: BucketPlan, parameters: list[Tensor]) -> set[int]:
        """Which tensors of a bucket this rank's backward did not use.

        DDP fills in zeros for them, or, for parameters switched off as ``toggle_optimizer`` does, whatever gradient
        an earlier backward has left.
        """
        if not self._hold_unused:
            return set()
        return {
            index
            for index, (parameter, bounds) in enumerate(zip(parameters, plan.bounds, strict=True))
            if not parameter.requires_grad or not bool(buffer[slice(*bounds)].any())
        }

    def _send_whole_bucket(self, buffer: Tensor, plan: BucketPlan, held: set[int]) -> "_Pending":
        if any(name in self.residuals for name in plan.names):
            # Left from a time of lower density (a run resumed with other settings): it goes out now.
            residual = self._residual(buffer, plan)
            for index, bounds in enumerate(plan.bounds):
                if index not in held:
                    left = residual[slice(*bounds)]
                    buffer[slice(*bounds)].add_(left, alpha=1.0 / self._gradient_scale)
                    left.zero_()
        self.traffic.add(entries_sent=buffer.numel())
        return _Pending(all_reduce_mean(buffer, self._group, self.traffic), lambda: buffer, _future(buffer))

    def _send_entries(self, buffer: Tensor, plan: BucketPlan, held: set[int]) -> "_Pending":
        residual = self._residual(buffer, plan)
        compressed = compress(
            buffer, residual, plan, held, self.thresholds, self._gradient_scale, reselect=self.config.guard
        )
        self._observed += compressed.observed
        self._selected |= compressed.selected
        self.traffic.add(entries_sent=compressed.num_entries)
        work, gathered = all_gather_payload(compressed.payload, self._group, self.traffic)
        factor = 1.0 / (self._gradient_scale * self._group.size())
        return _Pending(work, lambda: decompress(gathered, buffer, plan, factor), _future(buffer))

    def _residual(self, buffer: Tensor, plan: BucketPlan) -> Tensor:
        residual = self.residuals.flat(plan.names, plan.sizes, plan.residual_dtype, buffer.device)
        if self._loss_scale is not None:
            self._undo.append((residual, residual.clone()))
        return residual

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.traffic.add(seconds=perf_counter() - start)


class _Pending(NamedTuple):
    """A bucket under way."""

    work: dist.Work
    read: Callable[[], Tensor]
    future: Future[Tensor]


def _future(buffer: Tensor) -> Future[Tensor]:
    return Future() if buffer.device.type == "cpu" else Future(devices=[buffer.device])


def _entries(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient
