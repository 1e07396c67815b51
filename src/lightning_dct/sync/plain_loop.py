"""The method in a loop of the user's own: it needs an optimizer, a process group and nothing of Lightning's Trainer.

updates = lightning_dct.Updates(model, optimizer, density=0.03)
for batch in batches:
    loss(model, batch).backward(); optimizer.step(); optimizer.zero_grad()
with updates.shared_weights():
    evaluate(model)
updates.close()
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch.amp import GradScaler
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dct.agreement import check_agreement, describe_optimizers
from lightning_dct.compress.awaited import clock_of, recorded
from lightning_dct.config import DCTConfig, check_integer
from lightning_dct.failures.lifeline import lifeline_of_process
from lightning_dct.law import Given, RunSettings
from lightning_dct.sync.optimizer_trial import refuse
from lightning_dct.sync.setup import check_settings, make_gradient_synchronizer, make_update_synchronizer
from lightning_dct.traffic import Traffic


class _Loop:
    """What a strategy has, for a process that no launcher of Lightning's has started."""

    _timeout: timedelta | None = None
    project: Callable[[Module], None] | None = None
    synchronizer: Any

    def __init__(self, config: DCTConfig, model: Module, group: dist.ProcessGroup) -> None:
        self.config = config
        # It connects all ranks of the job.
        self.lifeline = lifeline_of_process() if group.size() == dist.get_world_size() else None
        # Which rank tells and warns; Lightning sets it, too.
        rank_zero_only.rank = getattr(rank_zero_only, "rank", dist.get_rank())  # type: ignore[attr-defined]
        # As torchrun says it; without it, each rank counts as a node of its own.
        self.node_rank = int(os.environ.get("GROUP_RANK", dist.get_rank()))
        self.local_rank = int(os.environ["LOCAL_RANK"]) if "GROUP_RANK" in os.environ else 0
        self.traffic = Traffic(recorded)
        self.traffic.clock = clock_of(next(model.parameters()).device)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, to save for each rank with those of model and optimizers: numbers, dicts, CPU tensors.

        If updates are exchanged, save the model's state within :meth:`Updates.shared_weights`, and load it first.
        """
        return self.synchronizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this rank's saved state (ValueError: another object's, or a tensor has another size)."""
        if "residuals" not in state or ("weights" in state) != (self.config.compress == "updates"):
            raise ValueError(f"This is not a state that `{type(self).__name__}.state_dict()` has made.")
        if "weights" in state and not self.synchronizer.weights.shown:
            self.synchronizer.weights.forget()
        self.synchronizer.load_state_dict(state)


class Updates(_Loop):
    """Exchanges the updates of a model's weights after its optimizers' steps.

    Each rank trains its own weights with its own optimizer on its own data. The optimizers' step hooks exchange what
    weights have moved; :mod:`lightning_dct.sync.updates` has the equations. Do not wrap the model in
    ``DistributedDataParallel``. All ranks make this object together, after ``torch.distributed.init_process_group``;
    they continue with the weights of the first one. Every rank must make the same steps, or all end with an error: a
    loss scaler may skip a step on one rank, as with fp16. Use bf16. ``traffic`` counts bytes and times.

    Args:
        model: Its parameters may be of several optimizers, or of none.
        optimizers: One, or several in the same order on every rank.
        steps: Optimizer steps of the run, from which settings that are left out follow; None if that is not known.
        process_group: The ranks that train together; by default all.
        average_buffers: Average the running statistics of normalisation layers, and take other buffers from rank 0.
        project: Brings the weights of the model back into their bounds after each step, in place.
        **settings: Those of :class:`~lightning_dct.DCTConfig`, for updates.

    Raises:
        TypeError: A setting has the wrong type, or its name is not known.
        ValueError: A setting is out of range, the ranks differ, or an optimizer does not go with updates.
    """

    def __init__(
        self,
        model: Module,
        optimizers: Optimizer | Sequence[Optimizer],
        *,
        steps: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        average_buffers: bool = True,
        project: Callable[[Module], None] | None = None,
        **settings: Any,
    ) -> None:
        given = Given.of(settings)
        if given.config.compress != "updates":
            raise ValueError("`Updates` exchanges updates of weights; got `compress='gradients'`. Use `Gradients`.")
        if isinstance(model, DistributedDataParallel):
            raise ValueError("`Updates` replaces `DistributedDataParallel`. Give it the model that is not wrapped.")
        group = process_group or dist.distributed_c10d._get_default_group()
        self.optimizers = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
        if not self.optimizers or not all(isinstance(one, Optimizer) for one in self.optimizers):
            raise TypeError(
                "`Updates` needs an optimizer after the model, or a list of several, each of torch's class."
            )
        for optimizer in self.optimizers:
            refuse(optimizer)
        if steps is not None:
            check_integer("steps", steps, minimum=1)
        self.project = project
        run_settings = RunSettings(given, group.size(), math.inf if steps is None else steps)
        super().__init__(run_settings.at(0), model, group)
        check_settings(given.config, model, {"process_group": group}, {"steps": steps})
        self.synchronizer = make_update_synchronizer(self, model, group, average_buffers, lambda: self.optimizers)
        self.synchronizer.run_settings = run_settings
        self.synchronizer.refresh_every = self.config.refresh_every
        check_agreement(describe_optimizers(self.optimizers, self.synchronizer.parameter_names), model, group)
        self._handles: list[RemovableHandle] = []
        self._begun: set[Optimizer] = set()
        for optimizer in self.optimizers:
            # Of a compiled `optimizer.step`, torch would compile the exchange, too.
            self._handles.append(optimizer.register_step_pre_hook(torch.compiler.disable(self._begin_step)))
            self._handles.append(optimizer.register_step_post_hook(torch.compiler.disable(self._end_step)))

    def _begin_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._begun.add(optimizer)
        self.synchronizer.begin_step(optimizer)

    def _end_step(self, optimizer: Optimizer, *_: Any) -> None:
        # A class whose `step` calls that of its base has two of them with hooks.
        if optimizer in self._begun:
            self._begun.remove(optimizer)
            self.synchronizer.after_step(optimizer)

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Have the weights that all ranks share in the model, to evaluate or save them; a collective call."""
        shown = self.synchronizer.evaluates  # within another evaluation, or after `close`
        if not shown:
            self.synchronizer.come_to("an evaluation", "an evaluation")
            self.synchronizer.begin_evaluation()
        try:
            if self.lifeline is not None and not shown:  # all ranks are here
                self.synchronizer.check_alike()
            yield
        finally:
            if self._handles and not shown:
                self.synchronizer.end_evaluation()

    def close(self) -> None:
        """Leave the shared weights in the model, and exchange no more; a collective call."""
        while self._handles:
            self._handles.pop().remove()
        self.synchronizer.come_to("the end", "`close`")
        if not self.traffic.totals.steps:
            rank_zero_warn("`Updates` has exchanged nothing: no optimizer that it was given has made a step.")
        self.synchronizer.warn_if_unsent()
        self.synchronizer.apply_all()
        with self.shared_weights():  # they stay
            self.synchronizer.exchange.close()


class Gradients(_Loop):
    """Averages compressed gradients in every backward, as the communication hook of ``DistributedDataParallel``.

    All ranks make this object together, after they have wrapped the model, and step as without it. ``traffic`` counts
    bytes and times.

    Args:
        model: The wrapped model.
        scaler: The ``GradScaler`` of training in fp16.
        **settings: Those of :class:`~lightning_dct.DCTConfig`, for gradients.

    Raises:
        TypeError: A setting has the wrong type, or its name is not known.
        ValueError: A setting is out of range, or the ranks differ.
        RuntimeError: The model has a communication hook already.
    """

    def __init__(self, model: DistributedDataParallel, *, scaler: GradScaler | None = None, **settings: Any) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(f"`Gradients` needs a model in `DistributedDataParallel`; got `{type(model).__name__}`.")
        super().__init__(DCTConfig(**{"compress": "gradients", **settings}), model, model.process_group)
        if self.config.compress != "gradients":
            raise ValueError("`Gradients` exchanges gradients; got `compress='updates'`. Use `Updates`.")
        check_settings(self.config, model.module, {"process_group": model.process_group}, {})
        self.synchronizer = make_gradient_synchronizer(self, model, scaler)
        self.synchronizer.refresh_every = self.config.refresh_every
        model.register_comm_hook(None, self.synchronizer.hook)
