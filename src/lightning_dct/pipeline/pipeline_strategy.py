"""``Trainer(strategy="dct_pipeline")``: connects the stages of a model to Lightning. No maths."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial, partialmethod
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_dct.activations.module import module_settings
from lightning_dct.agreement import check_agreement, gather_objects
from lightning_dct.base_strategy import check_torch
from lightning_dct.clipping import install_clipping
from lightning_dct.config import check_choice, check_integer
from lightning_dct.failures.collective_order import EXCHANGE
from lightning_dct.law import UserSettings
from lightning_dct.pipeline.mesh import PipelineMesh, synchronise_metrics
from lightning_dct.pipeline.placement import (
    Placement,
    convert,
    merge_optimizer_states,
    part_of_optimizer_state,
)
from lightning_dct.pipeline.runner import Delivered, Runner, patched_method, set_aside
from lightning_dct.pipeline.schedule import SCHEDULES, Pipeline, ScheduleName, check_schedule
from lightning_dct.strategy import DCTStrategy
from lightning_dct.sync.synchronizer import Synchronizer


class DCTPipelineStrategy(DCTStrategy):
    """Pipeline-parallel training with compressed activations between stages and compressed updates
    between replicas.

    The model's network is one ``torch.nn.Sequential`` with split points
    (:func:`~lightning_dct.subspace`) among its children. They cut it into pieces, which run on the
    ranks of a pipeline under a schedule of ``torch.distributed.pipelining``. Steps are written as
    for one process: they call the network once, and compute the loss from its output. World size /
    ``stages`` pipelines share the data, and synchronise each stage as
    :class:`~lightning_dct.DCTStrategy` does. With one pipeline there is nothing to synchronise.

    Example::

        network = SplitSequential(embedding, block, *subspace(256, rank=32, num_tokens=1000), block, head)
        trainer = Trainer(strategy=DCTPipelineStrategy(stages=2, micro_batches=4), devices=2)

    A :class:`~lightning_dct.SplitSequential` gives pieces further inputs by keyword. Keywords are
    not sent: every rank takes them from the batch.

    What differs from training in one process:

    * ``training_step`` sees one micro-batch at a time. The loss of a batch is the mean over its
      micro-batches, and logs are combined by ``self.log(reduce_fx=..., batch_size=...)``. Callbacks
      get only the loss of what ``training_step`` returns.
    * Steps run to their end on the ranks of the last stage only. Elsewhere they run up to their
      call of the network, to capture its arguments. All ranks get the logs and the results of
      evaluation steps. torchmetrics metrics have the same value everywhere. Other state that steps
      keep in ``self`` exists on the last stage only; of it, checkpoints have the buffers.
    * During ``fit`` a rank has the parameters of its own pieces; those of others have shapes but no
      memory. After fit every rank has the whole model.

    Args:
        accelerator: As for DDPStrategy.
        stages: Ranks per pipeline, at least 2.
        micro_batches: Parts of a training batch, along dimension 0.
        schedule: ``"gpipe"`` and ``"1f1b"`` take one piece per rank, ``"interleaved_1f1b"`` two or
            more.
        **settings: Everything DCTStrategy takes, by keyword.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting is out of range, or settings do not go together.
    """

    strategy_name = "dct_pipeline"
    # One pipeline compresses what passes between its stages.
    when_alone = ""
    not_copied_because = "and each rank has the parameters of its own stage only"
    without_tables = "Use `torch.nn.EmbeddingBag` in a stage, or `DCTStrategy`."

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        *,
        stages: int = 2,
        micro_batches: int = 4,
        schedule: ScheduleName = "1f1b",
        **settings: Any,
    ) -> None:
        check_integer("stages", stages, minimum=2)
        check_integer("micro_batches", micro_batches, minimum=1)
        check_choice("schedule", schedule, SCHEDULES)
        check_schedule(schedule, stages, micro_batches)
        check_torch(type(self))
        for setting in ("process_group", "static_graph", "find_unused_parameters"):
            if settings.get(setting):
                raise ValueError(
                    f"`DCTPipelineStrategy` cannot take `{setting}`: it makes its own process"
                    " groups and gives finished gradients to DistributedDataParallel. Leave the"
                    " setting out."
                )
        super().__init__(accelerator, **settings)
        self.stages = stages
        self.micro_batches = micro_batches
        self.schedule = schedule
        # Set when the processes have started.
        self.mesh: PipelineMesh = None  # type: ignore[assignment]
        self._placement: Any = None  # a Placement, and the Runner of its pieces
        self._runner: Any = None
        self._example_input: Any = None
        self._metrics: list[Metric] = []

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The data is split over pipelines: all ranks of one read the same."""
        return {
            "num_replicas": self.world_size // self.stages,
            "rank": self.global_rank // self.stages,
        }

    def connect(self, model: pl.LightningModule) -> None:
        """Refuse settings and callbacks that need the whole model, or the whole backward, at once
        (ValueError).
        """
        if not model.automatic_optimization:
            raise ValueError(
                "`DCTPipelineStrategy` works with automatic optimisation only: the schedule runs"
                " backward itself, in the middle of `training_step`. Remove"
                " `self.automatic_optimization = False`."
            )
        trainer = getattr(model, "_trainer", None)
        if any(
            isinstance(callback, BaseFinetuning) for callback in getattr(trainer, "callbacks", ())
        ):
            raise ValueError(
                "`BaseFinetuning` does not work with `DCTPipelineStrategy`: it compares parameters"
                " of all stages, and a rank has those of its own. Freeze and unfreeze with"
                " `requires_grad_` in the LightningModule's hooks."
            )
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "precision='16-mixed' does not work with `DCTPipelineStrategy`: backward runs stage"
                " by stage before the GradScaler could scale the loss, so small fp16 gradients"
                " would vanish. Use precision='bf16-mixed', which needs no scaling, or '32-true'."
            )
        super().connect(model)

    def setup_environment(self) -> None:
        """Start the processes and make the mesh."""
        super().setup_environment()
        if self.mesh is None:
            own = {
                "stages": self.stages,
                "micro_batches": self.micro_batches,
                "schedule": self.schedule,
            }
            # Before the groups: if ranks made different ones, they would hang.
            check_agreement({**own, **vars(self.config)}, nn.Module(), None)
            self.mesh = PipelineMesh(self.stages, self.root_device.type, self._timeout)
            if self.stages == self.world_size:
                # There is no other pipeline to exchange updates with.
                self.user_settings = UserSettings(
                    replace(self.user_settings.config, density=1.0, density_per_parameter={})
                )

    def setup(self, trainer: pl.Trainer) -> None:
        """Cut the model, keep this rank's pieces, and wrap them."""
        module = self._module
        mesh = self.mesh
        # Before the cut: after it a rank has only its own pieces.
        check_agreement(module_settings(module), module, None)
        placement = self._placement = Placement(module, mesh, self.schedule == "interleaved_1f1b")
        self.sharded_tables()  # refuses any
        if trainer.state.fn == TrainerFn.FITTING:
            placement.check_parameters()
            # The model's summary and loggers would run it through the whole model, of which a rank
            # has a part.
            self._example_input = module.example_input_array
            module.example_input_array = None
            super().setup(trainer)
            install_clipping(self.precision_plugin, mesh.pipeline, lambda parameter: True)
        else:
            assert self.accelerator is not None
            for name, compressed in self.compressed_modules().items():
                compressed.name = name
                compressed.traffic = self.split_traffic
            self.accelerator.setup(trainer)
            self.precision_plugin.convert_module(module)
            placement.copy_from_rank_zero()
            self.model_to_device()
            self.setup_precision_plugin()
        self._metrics = synchronise_metrics(module, mesh)
        precision = self.precision_plugin.forward_context
        pipeline = Pipeline(
            placement.pieces, mesh, self.schedule, self.micro_batches, self.root_device, precision
        )
        self._runner = Runner(module, placement.network, pipeline, self._metrics)

    def model_to_device(self) -> None:
        """Move this rank's pieces to its device, and free the others for training."""
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            convert(self._placement.foreign, lambda tensor: tensor.to("meta"))
            self._placement.spread = True
        with self._placement.without_foreign():
            super().model_to_device()

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Make the optimizers of all parameters, in the same order on every rank, with state for
        this rank's.
        """
        super().setup_optimizers(trainer)
        # Adagrad and others create it in advance.
        for optimizer in self.optimizers:
            for parameter in [parameter for parameter in optimizer.state if parameter.is_meta]:
                del optimizer.state[parameter]

    def configure_ddp(self) -> None:
        """Have data parallelism leave other stages' parameters alone."""
        self._module._ddp_params_and_buffers_to_ignore = self._placement.not_synchronised
        self._ddp_kwargs["process_group"] = self.mesh.data_parallel
        super().configure_ddp()

    def teardown(self) -> None:
        """Undo the wrapping, and give every rank the whole model unless fit has failed."""
        for metric in self._metrics:
            metric.dist_sync_fn = None
        self._ddp_kwargs.pop("process_group", None)
        self._runner = None
        self._metrics = []
        if self._example_input is not None:
            self._module.example_input_array = self._example_input
            self._example_input = None
        placement = self._placement
        if placement is None or not placement.spread:
            super().teardown()
            return
        failed = self._module.trainer.state.status == TrainerStatus.INTERRUPTED
        with placement.without_foreign():
            super().teardown()
        vars(self._module).pop("_ddp_params_and_buffers_to_ignore", None)
        if not failed:
            placement.gather_stages()

    def training_step(self, *arguments: Any) -> Tensor:
        """Run a batch through the pipeline, forward and backward, and return its loss on every
        rank.
        """
        self._placement.check_trained()
        self.check_order(f"{EXCHANGE} of activations in training_step", group=self.mesh.pipeline)
        # Each once, and anew in each step, because callbacks unfreeze some.
        modules = (piece.modules for piece in self._placement.own)
        own = list(
            dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad)
        )
        with set_aside(own) as gradients:
            loss = self._runner.train(*arguments)
        self.split_traffic.add(steps=1)
        delivery = partial(Delivered.apply, loss, gradients, *own)
        if not isinstance(self.model, DistributedDataParallel):
            return delivery()
        # As the forward of the wrapped model, so that DistributedDataParallel synchronises its
        # backward.
        with patched_method(self.model.module, "forward", delivery):
            output: Tensor = self.model()
        return output

    def _evaluate(self, step: str, context: str, *arguments: Any) -> Any:
        """Run a batch through the stages, and the step on the last."""
        self.check_order(f"{EXCHANGE} of activations in {step}", group=self.mesh.pipeline)
        with getattr(self.precision_plugin, context)():
            return self._runner.evaluate(step, *arguments)

    validation_step = partialmethod(_evaluate, "validation_step", "val_step_context")
    test_step = partialmethod(_evaluate, "test_step", "test_step_context")
    predict_step = partialmethod(_evaluate, "predict_step", "predict_step_context")

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Combine values over the pipelines: all ranks of a pipeline have the same value, which
        counts once.
        """
        return super().reduce(
            tensor, self.mesh.data_parallel if group is None else group, reduce_op
        )

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, decided for something."""
        self.check_order("a common decision")
        votes = sum(gather_objects(bool(decision), self.mesh.everyone))
        return votes == self.world_size if all else votes > 0

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model's state on rank 0, as of a single process; elsewhere this rank's part."""
        self.check_order("a checkpoint")
        state = super().lightning_module_state_dict()
        if self._placement is None or not self._placement.spread:
            return state
        # Each stage's part replaces the meta tensors.
        for part in self.mesh.gather_on_first(self._placement.part_of(self.mesh.stage, state))[1:]:
            state.update(part)
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of all parameters on rank 0, as of a single process; elsewhere this rank's
        part.
        """
        # After fit, too, a rank has the state of its own stage.
        part = part_of_optimizer_state(super().optimizer_state(optimizer), optimizer)
        return merge_optimizer_states(self.mesh.gather_on_first(part))

    def _own_state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        return part_of_optimizer_state(super()._own_state_of(optimizer), optimizer)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of the parameters on this rank."""
        states = [
            part_of_optimizer_state(state, optimizer)
            for optimizer, state in zip(
                self.optimizers, checkpoint["optimizer_states"], strict=False
            )
        ]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})

    def _restore(self, synchronizer: Synchronizer, state: dict[str, Any]) -> None:
        self._placement.drop_foreign(state)
        super()._restore(synchronizer, state)
