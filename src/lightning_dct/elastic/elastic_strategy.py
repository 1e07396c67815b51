"""``Trainer(strategy="dct_elastic")``: local updates among the ranks that are present, each a
process of its own.

A rank joins when its fit begins: it takes a checkpoint from a peer, over the network, and resumes
from that. It leaves when it dies or its fit ends. In between it meets the others in exchanges only,
at the end of a batch.
"""

import json
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_dct.callbacks.internal import EvaluationJoin, InternalCallback
from lightning_dct.callbacks.run_advice import RunAdvice, run_length
from lightning_dct.checkpoint.reading import merge_states
from lightning_dct.elastic import joining
from lightning_dct.elastic.elastic_updates import (
    HANDS_OVER,
    ElasticUpdates,
    Header,
    gather_headers,
    refuse_not_in_place,
)
from lightning_dct.elastic.present import LIGHTHOUSE, RESTARTED, PresentRanks, import_torchft
from lightning_dct.exchange.collectives import Link
from lightning_dct.exchange.compressed import AllGather
from lightning_dct.law import RunLength
from lightning_dct.lightning_private import checkpoint_of, restore_from
from lightning_dct.saving import STATE_KEY
from lightning_dct.strategy import DCTStrategy
from lightning_dct.sync.buffers import PresentBuffers, buffers_of, statistics_of
from lightning_dct.sync.projection import Projection
from lightning_dct.sync.setup import exchanges_buffers, parameter_names, refuse_same_memory
from lightning_dct.sync.updates import UpdateSynchronizer
from lightning_dct.sync.views import View
from lightning_dct.traffic import plain_table

# How long a rank waits at the start of a run for the others that were asked for.
START_S = 300.0


class DCTElasticStrategy(DCTStrategy):
    """Data-parallel training in which ranks may die, stall, join and leave.

    :mod:`lightning_dct.elastic.elastic_updates` has the equations. Something outside starts each
    rank by itself, with its ``NODE_RANK`` and ``LOCAL_RANK``, starts it again if it dies, and gives
    all the address of a lighthouse in ``TORCHFT_LIGHTHOUSE``; ``examples/elastic/start.py`` does.
    ``trainer.world_size`` and samplers mean the ranks that were asked for.

    Args:
        accelerator: As for DDPStrategy.
        **kwargs: As for :class:`~lightning_dct.DCTStrategy`, except what needs all ranks.

    Raises:
        ImportError: torchft is missing.
        ValueError: A setting needs all ranks.
    """

    strategy_name = "dct_elastic"
    without_tables = "Rows would be lost with a rank that dies. Use `strategy='dct'`."
    restore_checkpoint_after_setup = True
    fits: ClassVar[int] = 0  # of this process

    def __init__(self, accelerator: Any = None, **kwargs: Any) -> None:
        import_torchft()
        for setting, only in ONLY.items():
            if setting in kwargs and kwargs[setting] not in only:
                raise ValueError(
                    f"`strategy='dct_elastic'` cannot take `{setting}={kwargs[setting]!r}`, which"
                    " needs all ranks. Leave it out, or use `strategy='dct'`."
                )
        # In these two statements, and with no `kwargs.get` above: LightningCLI reads here which
        # settings there are.
        kwargs |= {"exchange": "all_gather", "lifelines": False}
        super().__init__(accelerator, **kwargs)
        self._pretends = False
        self._given: Mapping[str, Any] | None = None
        self._marked = self._seconds = (
            0.0  # since the last optimizer step, without what is not training
        )
        self._last: dict[str, Any] = {"loss": torch.zeros(())}  # what the last step has returned

    # Ranks, and what they do together.

    @property
    def world_size(self) -> int:
        """The number of ranks that were asked for."""
        return 1 if self._pretends else super().world_size

    @property
    def global_rank(self) -> int:
        """This rank's number among them."""
        return 0 if self._pretends else super().global_rank

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """This rank's part of the training data; all of the data to evaluate."""
        is_training = self._module.trainer.training
        return super().distributed_sampler_kwargs if is_training else {"num_replicas": 1, "rank": 0}

    @contextmanager
    def _by_itself(self) -> Iterator[None]:
        """Save and load as a run of one rank does."""
        self._pretends = True
        try:
            yield
        finally:
            self._pretends = False

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self.num_processes > 1 and not self.cluster_environment.creates_processes_externally:
            raise ValueError(
                f"`strategy='dct_elastic'` does not start `devices={self.num_processes}` processes,"
                " because Lightning would end all if one dies. Start each rank by itself, with its"
                f" LOCAL_RANK: `python examples/elastic/start.py {self.num_processes} train.py`"
                " does, and starts one again that has died."
            )
        super()._configure_launcher()

    def setup_distributed(self) -> None:
        """Make a process group of this rank alone."""
        reset_seed()
        self.set_world_ranks()
        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    # Joining.

    def connect(self, model: pl.LightningModule) -> None:
        """Add the callbacks that this strategy works with."""
        super().connect(model)
        trainer: Any = getattr(model, "_trainer", None)
        if trainer is not None:
            others = RunAdvice | EvaluationJoin | ExchangeAfterBatch
            rest = [one for one in trainer.callbacks if not isinstance(one, others)]
            trainer.callbacks[:] = [ExchangeAfterBatch(), *rest]

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up the model, then join the others or start with them."""
        if not self._module.automatic_optimization:
            raise ValueError(
                "`strategy='dct_elastic'` needs automatic optimization. Use `strategy='dct'`."
            )
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks if trainer.state.fn == TrainerFn.FITTING else ():
            # On trial, then back to a checkpoint.
            if isinstance(callback, LearningRateFinder | BatchSizeFinder):
                raise ValueError(
                    f"`strategy='dct_elastic'` cannot run `{type(callback).__name__}`, because each"
                    " rank would search by itself. Run the search first, on one machine with"
                    " `strategy='auto'` or `'dct'`, and give its result to the model."
                )
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            # Before the view of the shared weights, too.
            callbacks.sort(key=lambda one: not isinstance(one, ExchangeAfterBatch))
            DCTElasticStrategy.fits += 1
            self._join()

    def _make_updates(self) -> ElasticUpdates:
        names = parameter_names(self._module)
        refuse_not_in_place(names)
        refuse_same_memory(names)
        lighthouse = os.environ.get(LIGHTHOUSE)
        if not lighthouse:
            raise ValueError(
                f"`strategy='dct_elastic'` needs the address of a lighthouse in {LIGHTHOUSE}."
                " `examples/elastic/start.py` starts one."
            )
        self._given = None
        self.present = PresentRanks(self.global_rank, lighthouse, self._give, self._take)
        exchange = AllGather(Link(self.present, self.traffic))  # type: ignore[arg-type]
        # Planned for as many ranks as were asked for, so that all that are present send alike.
        exchange.link_traversals = float(self.world_size)
        named = partial(buffers_of, self._module) if exchanges_buffers(self._ddp_kwargs) else dict
        buffers = PresentBuffers(named, partial(statistics_of, self._module))
        every = (lambda: self.optimizers), (lambda: list(self._module.parameters()))
        made = ElasticUpdates(self.config, names, exchange, buffers, *every, rank=self.global_rank)
        made.project = None if self.project is None else Projection(self.project, self._module)
        return made

    @property
    def _elastic(self) -> ElasticUpdates:
        assert isinstance(self.synchronizer, ElasticUpdates)
        return self.synchronizer

    def _join(self) -> None:
        """Take the state of a peer if the run has begun; else wait for the other ranks and start
        alike.
        """
        present = self.present
        began = time.monotonic()
        trainer = self._module.trainer
        # Ranks that start together train the same parameters, too.
        settings = zlib.crc32(
            repr((self._settings(), joining.trained_names(self._module))).encode()
        )
        restarted = os.environ.get(RESTARTED) == "1"
        while True:
            late = time.monotonic() - began > START_S
            if not present.start_quorum():
                time.sleep(1.0)
                continue
            header = Header(self.global_rank, -1, 0, settings, 0, ready=int(late and not restarted))
            headers = gather_headers(present, header)
            if not headers or any(one.step >= 0 for one in headers):
                if present.should_commit() and self._given is not None:
                    break
            elif len({one.num_bytes for one in headers}) > 1:
                raise ValueError(
                    "The ranks have different settings or models, or are in different fits of"
                    f" their scripts. Those of rank {self.global_rank}: {self._settings()}"
                )
            elif len(headers) >= self.world_size or any(one.ready for one in headers):
                for tensor in (*self._module.parameters(), *self._module.buffers()):
                    same = tensor.detach().contiguous()
                    present.spread(same)
                    tensor.detach().copy_(same)
                # Ranks may have more data or less than the first one.
                situation = present.spread_text(
                    json.dumps(joining.situation_of(self._module, run_length(trainer)[:2]))
                )
                if present.should_commit():
                    self._take_situation(json.loads(situation))
                    break
            elif late and restarted:
                raise RuntimeError(
                    "This rank was started again, and the others have finished or are gone."
                )
            time.sleep(0.2)
        if self._given is not None:
            joining.compare_settings(self._given["settings"], self._settings())
            self._take_situation(self._given["situation"])
            restore_from(trainer, dict(self._given["checkpoint"]))
        verb = "has joined a run" if self._given is not None else "starts"
        print(
            f"lightning_dct: rank {self.global_rank} {verb}, {present.size()} ranks are present.",
            flush=True,
        )

    def _take_situation(self, situation: Mapping[str, Any]) -> None:
        self.length = RunLength(*situation["length"])
        joining.take_situation(self._module, situation)

    def _settings(self) -> dict[str, str]:
        return joining.settings_of(self._module, self.user_settings.config, self.fits)

    def _ranks_that_exchange(self, updates: UpdateSynchronizer) -> int:
        return self.world_size  # as many as were asked for, whoever is present

    def _agreed_length(self) -> RunLength:
        return self.length  # as the first rank has expected

    def _give(self) -> dict[str, Any]:
        """This rank's state for a peer, at a meeting: nothing in it changes before the meeting
        ends.
        """
        if self._given is not None or self._elastic.step == 0:
            return dict(self._given or {})
        weights = self._elastic.weights
        shared = {name: weights.shared(name) for name in weights.parameters}
        with self._elastic.views.shared(View.SAVE):
            checkpoint = checkpoint_of(self._module.trainer)
        checkpoint[STATE_KEY] = {
            **merge_states([self._state()]),
            "weights": {},
            "shared": {},
            "own_decay": {},
        }
        situation = joining.situation_of(self._module, self.length[:2])
        given = {
            "settings": self._settings(),
            "situation": situation,
            "checkpoint": checkpoint,
            "shared": shared,
        }
        return {**self._elastic.give(), **given}

    def _take(self, given: Mapping[str, Any]) -> None:
        if not given:
            self.present.invalidate()
        elif self._elastic.step:
            self._elastic.catch_up(given)
        else:
            self._given = given

    # Training.

    def set_density(self, density: float) -> None:
        """Refuse it: ranks come to a step at different times, or not at all (ValueError)."""
        raise ValueError(
            f"`strategy='dct_elastic'` cannot set density={density!r} in mid-run, because its ranks"
            " come to a step at different times. Give `density` to the strategy, or use"
            " `strategy='dct'`."
        )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step; a rank that is behind or slow passes over it, with the last output
        and no gradients.
        """
        if not self._elastic.trains:
            return {**self._last, "loss": self._last["loss"].clone().requires_grad_()}
        output = super().training_step(*args, **kwargs)
        if output is not None:
            result = output if isinstance(output, Mapping) else {"loss": output}
            self._last = apply_to_collection(dict(result), Tensor, Tensor.detach)
        return output

    def after_batch(self) -> None:
        """Exchange updates if that is due; Lightning has counted the batch."""
        updates = self._elastic
        now = time.monotonic()
        self._seconds += now - self._marked
        if updates.is_trained is not None:
            updates.add_step(updates.is_trained, self._seconds)
            self._seconds = 0.0
        if updates.due:
            updates.exchange_updates()
        self._marked = time.monotonic()

    def on_train_start(self) -> None:
        """Begin to measure."""
        super().on_train_start()
        if self._given is not None:
            self._elastic.note_peer(self._given)
            self._elastic.commit()  # the round in which this rank has joined
            self._given = None
        self._marked = time.monotonic()
        self._seconds = 0.0
        self._elastic.is_trained = None

    def on_validation_end(self) -> None:
        """Measure steps without the validation."""
        super().on_validation_end()
        self._marked = time.monotonic()

    def on_train_end(self) -> None:
        """Leave the others, and say what each rank has done."""
        super().on_train_end()
        updates = self._elastic
        rows = [["rank", "steps trained", "exchanges"]]
        rows += [
            [f"{rank}", f"{done:,}", f"{met:,}"]
            for rank, (done, met) in sorted(updates.tallies.items())
        ]
        rank_zero_info(
            f"Ranks that this rank has met in {updates.exchanges} exchanges"
            f" ({updates.seconds_met:.1f} s); {updates.present.failed_meetings} more exchanges have failed:\n"
            + plain_table(rows)
        )
        self.present.close()

    def on_exception(self, exception: BaseException) -> None:
        """Hand over to the others what this rank has not sent, if its machine asks it to end."""
        if isinstance(exception, SIGTERMException) and self.is_fitting and self._elastic.step:
            print(
                f"lightning_dct: rank {self.global_rank} hands over what it has not sent, and"
                " leaves.",
                flush=True,
            )
            self._elastic.apply_all(ready=HANDS_OVER)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Leave the others."""
        if self.synchronizer is not None:
            self.present.close()
        super().teardown()

    # Checkpoints: one rank writes them, as a run of one rank does.

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Save from the first rank that is present."""
        if self._writes():
            with self._by_itself():
                super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove from the first rank that is present."""
        if self._writes():
            with self._by_itself():
                super().remove_checkpoint(filepath)

    def _writes(self) -> bool:
        return (self.global_rank if self.synchronizer is None else self.present.rank()) == 0

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, or what a peer has given to this rank.

        Raises:
            ValueError: The ranks start with different checkpoints.
        """
        if self._given is not None:
            return dict(self._given["checkpoint"])
        with self._by_itself():
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            while not joining.compare_starts(
                self.present, checkpoint, self.global_rank, checkpoint_path, START_S
            ):
                # with a rank that is started again; the others may have begun meanwhile
                self._join()
                if self._given is not None:
                    return dict(self._given["checkpoint"])
            # Clocks begin anew, as after plain DDP.
            if not checkpoint.get(STATE_KEY, {}).get("exchange_clocks"):
                self.length = self.length._replace(
                    steps=max(1.0, self.length.steps - checkpoint["global_step"])
                )
        return checkpoint


class ExchangeAfterBatch(InternalCallback):
    """Exchanges updates before other callbacks see the weights after a batch."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Exchange updates if that is due."""
        trainer.strategy.after_batch()  # type: ignore[attr-defined]


# What cannot be elastic, and the values that can.
ONLY: dict[str, tuple[Any, ...]] = {
    "compress": ("updates",),
    "overlap_steps": (0,),
    "exchange": ("auto", "all_gather"),
    "lifelines": (False, True),
    "process_group": (None,),
    "find_unused_parameters": (False,),
}
