"""The method in a loop of the user's own: it needs an optimizer, a process group and nothing of
Lightning's Trainer.

updates = lightning_dct.Updates(model, optimizer, density=0.03)
for batch in batches:
    loss(model, batch).backward(); optimizer.step(); optimizer.zero_grad()
with updates.shared_weights():
    evaluate(model)
updates.close()
"""

import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_dct.agreement import check_agreement, describe_optimizers
from lightning_dct.clipping import clip_by_norm_of_mean
from lightning_dct.compress.awaited import clock_of, recorded
from lightning_dct.config import DCTConfig, check_integer
from lightning_dct.failures.lifeline import check_lifelines, lifeline_of_process
from lightning_dct.law import RunSettings, UserSettings
from lightning_dct.step_hooks import see_steps
from lightning_dct.sync.entrance import StepEntrance
from lightning_dct.sync.optimizer_trial import refuse, warn_of_late_gradients
from lightning_dct.sync.setup import (
    check_settings,
    make_gradient_synchronizer,
    make_update_synchronizer,
    refuse_group_of_others,
)
from lightning_dct.sync.views import View
from lightning_dct.traffic import Traffic


class _Loop:
    """What a strategy has, for a process that no launcher of Lightning's has started."""

    _timeout: timedelta | None = None
    project: Callable[[Module], None] | None = None
    synchronizer: Any

    def __init__(
        self,
        config: DCTConfig,
        model: Module,
        group: dist.ProcessGroup,
        lifelines: bool | int | None,
    ) -> None:
        self.config = config
        if lifelines is not None:
            check_lifelines(lifelines)
        # It connects all ranks of the job.
        connects_all = group.size() == dist.get_world_size()
        self.lifeline = lifeline_of_process(lifelines) if connects_all else None
        # Which rank tells and warns; Lightning sets it, too.
        rank_zero_only.rank = getattr(rank_zero_only, "rank", dist.get_rank())  # type: ignore[attr-defined]
        # As torchrun says it; without it, each rank counts as a node of its own.
        self.node_rank = int(os.environ.get("GROUP_RANK", dist.get_rank()))
        self.local_rank = int(os.environ["LOCAL_RANK"]) if "GROUP_RANK" in os.environ else 0
        self.traffic = Traffic(recorded)
        self.traffic.clock = clock_of(next(model.parameters()).device)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, to save for each rank with those of model and optimizers: numbers,
        dicts, CPU tensors.

        If updates are exchanged, save the model's state within :meth:`Updates.shared_weights`, and
        load it first.
        """
        return self.synchronizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this rank's saved state (ValueError: another object's, or a tensor has
        another size).
        """
        if "residuals" not in state or ("weights" in state) != (self.config.compress == "updates"):
            raise ValueError(
                f"This is not a state that `{type(self).__name__}.state_dict()` has made."
            )
        if "weights" in state and not self.synchronizer.views.are_open:
            self.synchronizer.weights.forget()
        self.synchronizer.load_state_dict(state)


class Updates(_Loop):
    """Exchanges the updates of a model's weights after its optimizers' steps.

    Each rank trains its own weights with its own optimizer on its own data. Hooks on optimizers'
    steps exchange what weights have moved (:mod:`lightning_dct.sync.entrance`);
    :mod:`lightning_dct.sync.updates` has the equations. An
    optimizer that is made later, as for a second phase of the training, takes part from its first
    step on the model's parameters on. Do not wrap the model in ``DistributedDataParallel``. All
    ranks make this object together, after ``torch.distributed.init_process_group``; they continue
    with the weights of the first one. Every rank must make the same steps, or all end with an
    error: a loss scaler may skip a step on one rank, as with fp16. Use bf16. ``traffic`` counts
    bytes and times.

    Args:
        model: Its parameters may be of several optimizers, or of none.
        optimizers: One, or several in the same order on every rank.
        steps: Optimizer steps of the run, from which settings that are left out follow; None if
            that is not known.
        process_group: The ranks that train together; by default all. If it has only some of them,
            the others must make an ``Updates`` with a group of their own at the same time, because
            torch's groups are made by all ranks of a job together. With ``exchange="all_gather"``
            they need not.
        average_buffers: Average the running statistics of normalisation layers, and take other
            buffers from rank 0.
        project: Brings the weights of the model back into their bounds after each step, in place: a
            projection, which leaves weights within their bounds as they are.
        lifelines: As for DCTStrategy: False for none, or the port at which rank 0 listens. By
            default what :func:`~lightning_dct.init_process_group` was given.
        **settings: Those of :class:`~lightning_dct.DCTConfig`, for updates.

    Raises:
        TypeError: A setting has the wrong type, or its name is not known.
        ValueError: A setting is out of range, the ranks differ, or an optimizer does not go with
            updates.
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
        lifelines: bool | int | None = None,
        **settings: Any,
    ) -> None:
        given = UserSettings.of(settings)
        if given.config.compress != "updates":
            raise ValueError(
                "`Updates` exchanges updates of weights; got `compress='gradients'`. Use"
                " `Gradients`."
            )
        if isinstance(model, DistributedDataParallel):
            raise ValueError(
                "`Updates` replaces `DistributedDataParallel`. Give it the model that is not"
                " wrapped."
            )
        refuse_group_of_others(process_group)
        group = process_group or dist.distributed_c10d._get_default_group()
        given_optimizers = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
        if not given_optimizers or not all(isinstance(one, Optimizer) for one in given_optimizers):
            raise TypeError(
                "`Updates` needs an optimizer after the model, or a list of several, each of"
                " torch's class."
            )
        for optimizer in given_optimizers:
            _refuse_wrapper(optimizer)
            refuse(optimizer)
        if steps is not None:
            check_integer("steps", steps, minimum=1)
        self.project = project
        run_settings = RunSettings(given, group.size(), math.inf if steps is None else steps)
        super().__init__(run_settings.config_after(0), model, group, lifelines)
        as_under_ddp = {"process_group": group, "broadcast_buffers": average_buffers}
        check_settings(given.config, model, as_under_ddp, {"steps": steps})
        self.synchronizer = make_update_synchronizer(self, model, group, average_buffers)
        self.synchronizer.run_settings = run_settings
        self.synchronizer.refresh_every = self.config.refresh_every
        check_agreement(
            describe_optimizers(given_optimizers, self.synchronizer.parameter_names), model, group
        )
        self._entrance = StepEntrance(self.synchronizer)
        for optimizer in given_optimizers:
            self._entrance.follow(optimizer, is_agreed=True)
        self._entrance.watch()

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those whose steps are exchanged."""
        return [one for one in self.synchronizer.known.all() if one is not None]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip gradients by the norm of the ranks' mean gradient, in place of
        ``torch.nn.utils.clip_grad_norm_``.

        A rank's own gradient is longer than the mean, so its own norm would clip too much. Call it
        as usual, between backward and step. The call is not collective.

        Returns:
            About the norm of the mean of all ranks' gradients before clipping: a scalar of fp32.
        """
        parameters = [
            p for one in self.optimizers for group in one.param_groups for p in group["params"]
        ]
        return clip_by_norm_of_mean(
            dict.fromkeys(parameters), max_norm, self.synchronizer.norm_of_mean
        )

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Have the weights that all ranks share in the model, to evaluate or save them; a
        collective call.
        """
        if self.synchronizer.views.are_open:  # within another evaluation, or after `close`
            yield
            return
        try:
            self._evaluate(View.EVALUATION)
            yield
        finally:
            self.synchronizer.views.close(View.EVALUATION)

    def _evaluate(self, view: View) -> None:
        """Open a view of shared weights and buffers that are alike on all ranks."""
        self.synchronizer.check_order("an evaluation", "an evaluation")
        self.synchronizer.views.open(view, self.synchronizer.exchange_buffers)
        if self.lifeline is not None:  # all ranks are here
            self.synchronizer.check_parameters_alike()

    def close(self) -> None:
        """Leave the shared weights in the model, and exchange no more; a collective call."""
        self._entrance.stop()
        self.synchronizer.check_order("the end", "`close`")
        if not self.traffic.totals.steps:
            rank_zero_warn(
                "`Updates` has exchanged nothing: no optimizer has stepped parameters of the model."
            )
        self.synchronizer.warn_if_unsent()
        self.synchronizer.apply_all()
        self._evaluate(View.END)
        self.synchronizer.exchange.close()


def _refuse_wrapper(optimizer: Optimizer) -> None:
    """Refuse an optimizer that torch's class has not set up, because it passes steps on to another
    one (TypeError).
    """
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise TypeError(
            f"`{type(optimizer).__name__}` has no step hooks, by which `Updates` sees steps: it"
            " wraps another optimizer, as that of accelerate's `prepare` does. Give `Updates` the"
            " one that it wraps, before you wrap it or as `optimizer.optimizer`, and step either."
        )


class Gradients(_Loop):
    """Averages compressed gradients in every backward, as the communication hook of
    ``DistributedDataParallel``.

    All ranks make this object together, after they have wrapped the model, and step as without it.
    ``traffic`` counts bytes and times.

    Args:
        model: The wrapped model.
        scaler: The ``GradScaler`` of training in fp16.
        lifelines: As for :class:`Updates`.
        **settings: Those of :class:`~lightning_dct.DCTConfig`, for gradients.

    Raises:
        TypeError: A setting has the wrong type, or its name is not known.
        ValueError: A setting is out of range, or the ranks differ.
        RuntimeError: The model has a communication hook already.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        *,
        scaler: GradScaler | None = None,
        lifelines: bool | int | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                "`Gradients` needs a model in `DistributedDataParallel`; got"
                f" `{type(model).__name__}`."
            )
        config = DCTConfig(**{"compress": "gradients", **settings})
        super().__init__(config, model, model.process_group, lifelines)
        if self.config.compress != "gradients":
            raise ValueError(
                "`Gradients` exchanges gradients; got `compress='updates'`. Use `Updates`."
            )
        check_settings(self.config, model.module, {"process_group": model.process_group}, {})
        self.synchronizer = make_gradient_synchronizer(self, model, scaler)
        self.synchronizer.refresh_every = self.config.refresh_every
        self._warned_of: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        if self.synchronizer.delays_gradients:
            see_steps(self, self._look_at)
        model.register_comm_hook(None, self.synchronizer.hook)

    def _look_at(self, optimizer: Optimizer, *_: Any) -> None:
        """Warn of an optimizer that loses quality with gradients that come late, at its first
        step.
        """
        if optimizer not in self._warned_of and self.synchronizer.is_stepped_by(optimizer):
            self._warned_of.add(optimizer)
            warn_of_late_gradients(optimizer)
