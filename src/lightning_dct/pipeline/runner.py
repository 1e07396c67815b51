"""Runs the user's steps over a pipeline, and gives the schedule's gradients to
DistributedDataParallel.

A step is ordinary code that calls the network once. To capture the arguments of that call, the
network's forward is replaced by one that ends the step. To compute a loss, it is replaced by one
that returns the last stage's output. So on the last stage the code before the call runs twice. It
has the same batch and draws the same random numbers both times.
"""

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torchmetrics import Metric

from lightning_dct.agreement import gather_objects
from lightning_dct.checksums import checksum_of
from lightning_dct.pipeline import steps
from lightning_dct.pipeline.borders import Border, trace_borders
from lightning_dct.pipeline.mesh import StepResults, to_device
from lightning_dct.pipeline.schedule import Pipeline
from lightning_dct.pipeline.sequential import NetworkCall, check_context, check_no_gradients

# How ranks of one pipeline differ, and the remedy.
_BATCHES = (
    "read different batches for `{step}`, and all of them must read the same. Begin the script with"
    " `seed_everything(0, workers=True)`, so that all ranks make, shuffle and augment data alike,"
    " and draw no random numbers on some ranks only. If the script splits data itself, use"
    " `trainer.distributed_sampler_kwargs` (`num_replicas`: pipelines, `rank`: this one) instead of"
    " `trainer.world_size` and `trainer.global_rank`."
)
_KEYWORDS = (
    "called the network with different keyword arguments in `{step}`. They do not cross between"
    " stages, so they must follow from the batch alone: compute them without state that ranks do"
    " not share, or make them part of the network's first argument."
)


@dataclass
class Runner:
    """The steps of a user's module on one rank, during a Trainer's run; ``network`` in it is cut
    into pieces.
    """

    module: pl.LightningModule
    network: nn.Sequential
    pipeline: Pipeline
    metrics: Sequence[Metric]

    def __post_init__(self) -> None:
        self._mesh = self.pipeline.mesh
        self._step_results = StepResults(self._mesh)
        self._borders: dict[Any, list[Border]] = {}
        self._checked: dict[tuple[str, str], int] = {}  # and in which epoch
        # Of the random numbers in steps, the same on all ranks of this pipeline.
        self._seed = self._mesh.share(torch.initial_seed(), 0)

    def train(self, batch: Any, *arguments: Any) -> Tensor:
        """Run forward and backward of a batch, which adds gradients to the parameters' ``.grad``.

        ``training_step`` gets each micro-batch, and the other arguments unchanged.

        Returns:
            The mean of the micro-batches' losses, without a graph; the same on every rank of the
            pipeline.

        Raises:
            ValueError: The batch cannot be cut into micro-batches of one shape, or ranks have read
                different batches.
            RuntimeError: ``training_step`` does not call the network exactly once, or returns no
                loss.
        """
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            raise RuntimeError(
                "Trainer(detect_anomaly=True) does not work with `DCTPipelineStrategy`: gradients"
                " cross between stages as bytes that read as NaN. Look for anomalies with one"
                " process and `strategy='auto'`."
            )
        self._check_same_data("training_step", _BATCHES, batch)
        micro_batches = self.pipeline.micro_batches
        parts = steps.split_batch(batch, micro_batches)
        with self.pipeline.precision():
            calls = [
                self._capture("training_step", number, part, *arguments)
                for number, part in enumerate(parts)
            ]
        self._check_same_data("training_step", _KEYWORDS, [call.context for call in calls])
        losses: list[Tensor] = []
        logged: list[list[steps.LogCall]] = []

        def loss_of(number: int, output: Any) -> Tensor:
            result, logs = self._finish("training_step", number, output, parts[number], *arguments)
            loss = steps.loss_in(result)
            losses.append(loss.detach())
            logged.append(logs)
            return loss.reshape(()) / micro_batches

        borders = self._borders_of(calls[0])
        if any(self._borders_of(call) != borders for call in calls[1:]):
            raise ValueError(
                "The micro-batches of this batch give the network inputs of different shapes; a"
                " schedule sends payloads of one size. Pad the inputs to the same shape for the"
                " whole batch."
            )
        self._step_results.post_receive()
        self.pipeline.train(
            calls, borders, loss_of, partial(self._drawing, "training_step", arguments)
        )
        result = (
            (torch.stack(losses).mean().cpu(), steps.combine(logged))
            if self._mesh.is_last
            else None
        )
        return self._share(result, self._step_results.share).to(self.pipeline.device)

    def evaluate(self, step: str, batch: Any, *arguments: Any) -> Any:
        """Run ``"validation_step"``, ``"test_step"`` or ``"predict_step"``, and return its result
        on every rank.

        The step sees the whole batch. Only the network runs in micro-batches, which may differ in
        size by a row. Each is masked by itself, as in training.
        """
        self._check_same_data(step, _BATCHES, batch)
        whole = self._capture(step, 0, batch, *arguments)
        self._check_same_data(step, _KEYWORDS, whole.context)
        calls = steps.split_ragged(whole, self.pipeline.micro_batches, batch)
        borders = [self._borders_of(call) for call in calls]
        outputs = self.pipeline.forward(calls, borders, partial(self._drawing, step, arguments))
        sent = None
        result = None
        if outputs is not None:
            result, logs = self._finish(step, 0, steps.join(outputs), batch, *arguments)
            sent = to_device(result, "cpu"), logs
        shared = self._share(sent, partial(self._mesh.share, stage=self._mesh.stages - 1))
        return to_device(shared, self.pipeline.device) if outputs is None else result

    def _share(
        self, result: tuple[Any, list[steps.LogCall]] | None, share: Callable[[Any], Any]
    ) -> Any:
        """Share the last stage's result and logs (None elsewhere), and repeat its logs and its
        metrics' counts.
        """
        own = (
            None if result is None else (*result, [metric._update_count for metric in self.metrics])
        )
        shared, logs, counts = share(own)
        for metric, count in zip(self.metrics, counts, strict=True):
            if metric._update_count != count:
                # Without this hack, metrics would warn about computing without data, and return
                # cached values.
                metric._update_count = count
                metric._computed = None
        steps.replay(self.module, logs)
        return shared

    def _capture(self, step: str, number: int, batch: Any, *arguments: Any) -> NetworkCall:
        """Run a step up to its call of the network, without logs, and return the arguments of that
        call.
        """

        def reach(input: Any, **context: Any) -> Any:
            check_context(self.network, context)
            check_no_gradients(context)
            raise _Reached(NetworkCall(input, context))

        if self._mesh.is_last:  # which runs the step again, and a step may change tensors in place
            batch = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
        try:
            self._run(step, number, (batch, *arguments), reach, lambda *_, **__: None)
        except _Reached as reached:
            return reached.args[0]
        raise RuntimeError(
            f"`{step}` never calls the Sequential that is cut into stages. Under"
            " `DCTPipelineStrategy` every step calls it once, as in `self.network(inputs)`."
        )

    def _finish(
        self, step: str, number: int, output: Any, batch: Any, *arguments: Any
    ) -> tuple[Any, list[steps.LogCall]]:
        """Run a step with a network that returns ``output``, and return its result and logs."""
        inputs: list[Any] = []
        logs: list[steps.LogCall] = []

        def answer(input: Any, **context: Any) -> Any:
            inputs.append(input)
            return output

        result = self._run(
            step, number, (batch, *arguments), answer, steps.recorder(self.module, logs)
        )
        if len(inputs) != 1:
            raise RuntimeError(
                f"`{step}` has called the Sequential that is cut into stages {len(inputs)} times."
                " Under `DCTPipelineStrategy` every step calls it once: join the inputs into one"
                " batch."
            )
        return result, logs

    def _run(self, step: str, number: int, arguments: Sequence[Any], forward: Any, log: Any) -> Any:
        """Run a step with another forward of the network and another ``self.log``."""
        network = patched_method(self.network, "forward", forward)
        gather = patched_method(self.module, "all_gather", _refuse)
        with (
            self._drawing(step, arguments[1:], number),
            network,
            gather,
            patched_method(self.module, "log", log),
        ):
            return getattr(self.module, step)(*arguments)

    @contextmanager
    def _drawing(self, step: str, arguments: Sequence[Any], *where: int) -> Iterator[None]:
        """Draw numbers that follow from the batch and ``where``.

        Others stay: ranks still shuffle data alike.
        """
        trainer = self.module.trainer
        numbers = [one for one in arguments if isinstance(one, int)]
        place = step, trainer.current_epoch, trainer.global_step, numbers
        seed = zlib.crc32(repr((self._seed, self._mesh.replica, place, *where)).encode())
        with isolate_rng():
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            yield

    def _borders_of(self, call: NetworkCall) -> list[Border]:
        leaves, structure = tree_flatten(call)
        kinds = tuple(
            (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
        )
        key = (self.module.training, structure, kinds)
        if key not in self._borders:
            pipeline = self.pipeline
            self._borders[key] = trace_borders(
                pipeline.pieces, call, pipeline.device, pipeline.precision
            )
        return self._borders[key]

    def _check_same_data(self, step: str, difference: str, data: Any) -> None:
        """Check, in the first batch of an epoch, that all ranks of the pipeline have the same
        tensors (ValueError).
        """
        if self._checked.get((step, difference)) == (epoch := self.module.trainer.current_epoch):
            return
        self._checked[step, difference] = epoch
        seen = [
            (leaf.shape, checksum_of(leaf))
            for leaf in tree_leaves(data)
            if isinstance(leaf, Tensor)
        ]
        if any(theirs != seen for theirs in gather_objects(seen, self._mesh.control)):
            raise ValueError(f"The ranks of one pipeline have {difference.format(step=step)}")


class _Reached(BaseException):
    """Ends the step with the network's arguments; no ``except Exception`` in user code catches
    it.
    """


@contextmanager
def patched_method(
    module: nn.Module, method: str, replacement: Callable[..., Any]
) -> Iterator[None]:
    """Replace a method of one module, as Lightning does for DDP: the instance's attribute hides the
    class's.
    """
    setattr(module, method, replacement)
    try:
        yield
    finally:
        delattr(module, method)


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "`self.all_gather` in a step would wait forever: under `DCTPipelineStrategy` only ranks of"
        " the last stage run the step to its end. Log with `self.log(..., sync_dist=True)`, or"
        " gather in `on_validation_epoch_end`."
    )


@contextmanager
def set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor | None]]:
    """Collect the gradients of the code inside in a list, one or None per parameter, and leave
    ``.grad`` unchanged.

    A schedule runs its own backward passes in the middle of ``training_step``, and then Lightning
    calls ``zero_grad`` and ``backward``. With :class:`Delivered`, accumulation and
    DistributedDataParallel's hooks work as usual.
    """
    before = [parameter.grad for parameter in parameters]
    gradients: list[Tensor | None] = []
    try:
        for parameter in parameters:
            parameter.grad = None
        yield gradients
        gradients.extend(parameter.grad for parameter in parameters)
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


class Delivered(torch.autograd.Function):
    """A copy of a scalar loss.

    Its backward, which may run once, scales gradients in place and returns them.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: Sequence[Tensor | None], *parameters: Tensor
    ) -> Tensor:
        """``gradients`` has one for each of the parameters."""
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients, times that of the loss."""
        (scale,) = grad_outputs
        gradients = ctx.gradients
        ctx.gradients = None
        return (None, None, *(None if g is None else g.mul_(scale.to(g.dtype)) for g in gradients))
