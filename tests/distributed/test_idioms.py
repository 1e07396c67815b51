"""What people do with DistributedDataParallel in Lightning goes on working under DCTStrategy."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from distributed.training import (
    Applied,
    Manual,
    Module,
    Run,
    Watch,
    assert_conserved,
    assert_learns,
    assert_replicas_equal,
    assert_weights_close,
    assert_weights_equal,
    fit,
    held_back,
    loader,
    local_gradients,
    perceptron,
    rank,
    summary,
    trainer_for,
)
from lightning_dct import DCTStrategy
from one_card import DEVICE

BATCHES = 24


class Adversaries(LightningModule):
    """Two models and two optimizers that take turns, as a GAN's do."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.generator = perceptron(in_features=40, out_features=40)
        self.judge = perceptron(in_features=40, out_features=8)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        inputs, outputs = batch
        losses = []
        for index, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            made = self.generator(inputs)
            judged = self.judge(made if index == 0 else made.detach())
            loss = (judged - outputs).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            losses.append(loss.detach())
        return {"loss": losses[0]}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(self.generator.parameters(), lr=0.1),
            torch.optim.SGD(self.judge.parameters(), lr=0.1),
        ]


class Branches(nn.Module):
    """A trunk and three branches, of which one is used, depending on the call and, for ``by_rank``,
    on the rank.
    """

    def __init__(self, by_rank: bool) -> None:
        super().__init__()
        self.trunk = perceptron(out_features=16)
        self.branches = nn.ModuleList(perceptron(in_features=16, out_features=8) for _ in range(3))
        self.offset = rank() if by_rank else 0
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        branch = self.branches[(self.calls // 2 + self.offset) % 3]
        self.calls += 1
        return branch(self.trunk(inputs))


class Lookup(nn.Module):
    """Numbers -> rows of an embedding with sparse gradients -> a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.embedding = nn.Embedding(60, 16, sparse=True)
            self.dense = nn.Linear(16 * 40, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = (inputs * 20).long().clamp(-30, 29) + 30
        return self.dense(self.embedding(rows).flatten(1))


class TwoOptimizers(Manual):
    """SparseAdam for the embedding, SGD for the rest."""

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SparseAdam(self.model.embedding.parameters(), lr=0.01),
            torch.optim.SGD(self.model.dense.parameters(), lr=0.02),
        ]


class Idiom(NamedTuple):
    """How a module is trained, and how many synchronisations that must take."""

    module: Callable[[], LightningModule] = Module
    strategy: dict[str, Any] = {}
    trainer: dict[str, Any] = {}
    synchronisations: int = BATCHES
    # A mean that is rounded to bf16 after the exchange is not conserved to fp32 precision.
    conserved: bool = True


def own_group() -> dist.ProcessGroup:
    return dist.new_group([0, 1])


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


IDIOMS = {
    "accumulation": Idiom(trainer={"accumulate_grad_batches": 4}, synchronisations=BATCHES // 4),
    "clip by norm": Idiom(trainer={"gradient_clip_val": 0.05}),
    "clip by value": Idiom(trainer={"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}),
    "manual": Idiom(Manual),
    "several optimizers": Idiom(
        Adversaries, {"find_unused_parameters": True}, synchronisations=2 * BATCHES
    ),
    "unused at times": Idiom(
        lambda: Module(Branches(by_rank=False), lr=0.2), {"find_unused_parameters": True}
    ),
    "unused on ranks": Idiom(
        lambda: Module(Branches(by_rank=True), lr=0.2), {"find_unused_parameters": True}
    ),
    "own process group": Idiom(strategy={"process_group": own_group}),
    "static graph, manual": Idiom(Manual, {"static_graph": True}),
    "copied gradients, accumulation": Idiom(
        strategy={"gradient_as_bucket_view": False},
        trainer={"accumulate_grad_batches": 3},
        synchronisations=BATCHES // 3,
    ),
    "many buckets": Idiom(strategy={"bucket_cap_mb": 0.0005}),
    "bf16-mixed": Idiom(trainer={"precision": "bf16-mixed"}),
    "bf16-true": Idiom(trainer={"precision": "bf16-true"}, conserved=False),
    "16-true": Idiom(trainer={"precision": "16-true"}, conserved=False),
    "64-true": Idiom(trainer={"precision": "64-true"}),
    "compiled module": Idiom(lambda: compiled(Module())),
    "sparse embedding": Idiom(lambda: Module(Lookup(), lr=0.02)),
    "sparse embedding, SparseAdam": Idiom(lambda: TwoOptimizers(Lookup())),
    "only small tensors": Idiom(strategy={"min_tensor_size": 100_000}),
}


def train_idiom(name: str, density: float | None, exchange: Any = "auto", **nodes: Any) -> Any:
    """One run: with DDP when ``density`` is None."""
    idiom = IDIOMS[name]
    settings = dict(idiom.strategy)
    if density is None:
        for ours in ("min_tensor_size", "process_group"):
            settings.pop(ours, None)
        strategy: DDPStrategy = DDPStrategy(**settings)
    else:
        strategy = DCTStrategy(
            compress="gradients", density=density, refresh_every=5, exchange=exchange, **settings
        )
    applied = Applied()
    module = idiom.module()
    with local_gradients() as given:
        watch = Watch()
        trainer = trainer_for(strategy, callbacks=[watch, applied], **nodes, **idiom.trainer)
        trainer.fit(module, loader(BATCHES, 40, 8))
        run = summary(strategy, trainer.lightning_module, watch)
    return run, (given, applied.sums, held_back(run.state, given) if run.state else {})


@pytest.mark.parametrize("name", IDIOMS)
def test_idiom_trains_densely_as_ddp_does(ranks: Any, name: str) -> None:
    """Oracle: DDPStrategy, bitwise, at density 1.0."""
    theirs = ranks(2).run(train_idiom, name, None)
    ours = ranks(2).run(train_idiom, name, 1.0)
    for (expected, _), (run, _) in zip(theirs, ours, strict=True):
        # A norm's last bit depends on where gradients lie.
        if name == "clip by norm" and DEVICE.type == "cuda":
            assert_weights_close(expected.weights, run.weights)
        else:
            assert_weights_equal(expected.weights, run.weights)
            assert run.losses == expected.losses
        assert run.synchronisations == IDIOMS[name].synchronisations


@pytest.mark.parametrize("name", IDIOMS)
def test_idiom_trains_compressed(ranks: Any, name: str) -> None:
    """Oracles: replicas equal, the loss falls, one synchronisation an optimizer step, gradients
    conserved in sum.
    """
    results = ranks(2).run(train_idiom, name, 0.1)
    runs = [run for run, _ in results]
    assert_replicas_equal(runs)
    assert_learns(runs[0])
    assert runs[0].synchronisations == IDIOMS[name].synchronisations
    assert all("_orig_mod" not in parameter for parameter in runs[0].residuals)
    if name == "only small tensors":
        assert not runs[0].residuals
        assert runs[0].totals.bytes_sent == runs[0].totals.bytes_dense
    else:
        assert runs[0].residuals
        assert runs[0].totals.bytes_sent < runs[0].totals.bytes_dense
    if IDIOMS[name].conserved:
        assert_conserved([sums for _, sums in results])


def train_updates(name: str, overlap_steps: int) -> tuple[Run, int]:
    idiom = IDIOMS[name]
    settings = {key: value for key, value in idiom.strategy.items() if key != "bucket_cap_mb"}
    strategy = DCTStrategy(
        density=0.3,
        local_steps=4,
        warmup_steps=6,
        overlap_steps=overlap_steps,
        refresh_every=5,
        **settings,
    )
    module = idiom.module()
    watch = Watch(every=BATCHES)
    trainer = trainer_for(strategy, callbacks=[watch], **idiom.trainer)
    trainer.fit(module, loader(BATCHES, 40, 8))
    return summary(strategy, trainer.lightning_module, watch), trainer.global_step


@pytest.mark.parametrize("name", IDIOMS)
def test_idiom_exchanges_updates(ranks: Any, name: str) -> None:
    """Oracles: shared weights equal, ranks' own weights not, the loss falls, steps and dense bytes
    are counted.
    """
    results = ranks(2).run(
        train_updates, name, 2 if name in ("accumulation", "several optimizers") else 0
    )
    runs = [run for run, _ in results]
    assert_replicas_equal(runs)
    assert_learns(runs[0])
    assert runs[0].synchronisations == runs[0].totals.steps == results[0][1]
    assert all("_orig_mod" not in parameter for parameter in runs[0].state["weights"])
    assert runs[0].totals.bytes_sent < runs[0].totals.bytes_dense
    own = [run.state["weights"] for run in runs]
    if name == "only small tensors":
        for parameter, weights in own[0].items():
            torch.testing.assert_close(weights, own[1][parameter])
    else:
        assert any(
            not torch.equal(weights, own[1][parameter]) for parameter, weights in own[0].items()
        )


def train_twice() -> list[Run]:
    """Two fits on one strategy, with manual optimisation."""
    strategy = DCTStrategy(compress="gradients", density=0.1, static_graph=True)
    watch = Watch()
    trainer = trainer_for(strategy, callbacks=[watch])
    runs = []
    for fits in range(1, 3):
        module = Manual()
        trainer.fit_loop.max_epochs = fits
        trainer.fit(module, loader(10, 40, 8))
        runs.append(summary(strategy, module, watch))
    assert len(watch.losses) == 20
    return runs


def test_second_fit_with_static_graph_synchronises(ranks: Any) -> None:
    """Oracle: the first fit, which starts from the same weights; Lightning's own flag would skip
    the second's start.
    """
    results = ranks(2).run(train_twice)
    for first, second in results:
        assert_weights_equal(first.weights, second.weights)
        assert second.synchronisations == first.synchronisations == 10
    assert_replicas_equal([second for _, second in results])


def thresholds_of(trainer: Trainer) -> dict[str, float]:
    return trainer.strategy.synchronizer.thresholds.state_dict()["values"]


def train_adversaries() -> Run:
    settings: dict[str, Any] = {
        "min_tensor_size": 128,
        "refresh_every": 6,
        "find_unused_parameters": True,
    }
    strategy = DCTStrategy(compress="gradients", density=0.1, adapt_threshold=False, **settings)
    return fit(strategy, Adversaries(), 12, watch=Watch(look=thresholds_of))


def test_thresholds_of_all_optimizers_are_refreshed(ranks: Any) -> None:
    """Oracle: without the guard a threshold changes on a refresh only, one every three batches of
    two steps each.
    """
    thresholds = ranks(2).run(train_adversaries)[0].seen
    assert len(thresholds[0]) == 4
    for name in thresholds[0]:
        values = [seen[name] for seen in thresholds]
        assert len(set(values)) == 4, f"{name}: {values}"


def residuals_and_weights(trainer: Trainer) -> Any:
    state = trainer.strategy.synchronizer.residuals.state_dict()
    weights = {
        name: weight.detach().clone()
        for name, weight in trainer.lightning_module.named_parameters()
    }
    return state, weights


def train_branches(by_rank: bool) -> list[Any]:
    strategy = DCTStrategy(compress="gradients", density=0.1, find_unused_parameters=True)
    watch = Watch(look=residuals_and_weights)
    return fit(strategy, Module(Branches(by_rank), lr=0.2), 12, watch=watch).seen


@pytest.mark.parametrize("by_rank", [False, True])
def test_residual_of_an_unused_tensor_is_kept(ranks: Any, by_rank: bool) -> None:
    """Oracle: which branch each rank used in each step; the residual of the others must not change
    by a bit.
    """
    seen = ranks(2).run(train_branches, by_rank)
    name = "model.branches.{}.first.weight"
    kept = 0
    for step in range(1, 12):
        used = [(step // 2 + (me if by_rank else 0)) % 3 for me in range(2)]
        for branch in range(3):
            for me in range(2):
                (before, weight_before), (after, weight_after) = seen[me][step - 1], seen[me][step]
                parameter = name.format(branch)
                if used[me] != branch:
                    assert torch.equal(before[parameter], after[parameter])
                    kept += float(after[parameter].norm()) > 0
                else:
                    assert not torch.equal(before[parameter], after[parameter])
                if branch not in used:
                    assert torch.equal(weight_before[parameter], weight_after[parameter])
                else:
                    assert not torch.equal(weight_before[parameter], weight_after[parameter])
    assert kept > 10


class Unfreeze(BaseFinetuning):
    """Freezes the first layer, and unfreezes it at epoch 1."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.model.first)

    def finetune_function(
        self, pl_module: LightningModule, epoch: int, optimizer: torch.optim.Optimizer
    ) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.first, optimizer, lr=0.1)


def train_unfrozen(density: float | None, settings: dict[str, Any]) -> Run:
    strategy = (
        DDPStrategy(**settings)
        if density is None
        else DCTStrategy(compress="gradients", density=density, **settings)
    )
    return fit(strategy, Module(), 8, callbacks=[Unfreeze()], max_epochs=3)


@pytest.mark.parametrize(
    "settings",
    [{"gradient_as_bucket_view": False}, {"static_graph": True}, {"find_unused_parameters": True}],
    ids=lambda settings: next(iter(settings), "plain"),
)
def test_unfrozen_parameters_are_synchronised(ranks: Any, settings: dict[str, Any]) -> None:
    """Oracle: replicas of ranks that see different data stay equal, and the unfrozen layer
    moves.
    """
    runs = ranks(2).run(train_unfrozen, 0.1, settings)
    assert_replicas_equal(runs)
    assert runs[0].synchronisations == 24
    assert "model.first.weight" in runs[0].residuals
    assert not torch.equal(runs[0].weights["model.first.weight"], perceptron().first.weight)


def test_unfrozen_parameters_at_density_one_train_as_if_never_frozen_by_ddp(ranks: Any) -> None:
    """Oracle: DDP over all parameters, with the frozen layer's gradients discarded in epoch 0."""
    ours = ranks(2).run(train_unfrozen, 1.0, {})
    theirs = ranks(2).run(train_held_back)
    assert_weights_close(theirs[0].weights, ours[0].weights)


class HeldBack(Module):
    """What Unfreeze does, without DDP knowing of it."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.current_epoch == 0:
            self.model.first.zero_grad()


def train_held_back() -> Run:
    return fit(DDPStrategy(), HeldBack(), 8, max_epochs=3)


def train_with_overrides() -> dict[str, int]:
    """Of a compiled submodule, whose first layer is frozen as yet."""
    overrides = {"model.first.*": 0.25, "*second*": 0.1}
    strategy = DCTStrategy(compress="gradients", density=0.02, density_per_parameter=overrides)
    run = fit(strategy, Module(compiled(perceptron())), 4, callbacks=[Unfreeze()], max_epochs=2)
    return run.state["thresholds"]["targets"]


def test_density_overrides(ranks: Any) -> None:
    """Oracle: ceil(density x size) of each tensor, worked out by hand."""
    expected = {"model.first.weight": 240, "model.first.bias": 6, "model.second.weight": 20}
    assert ranks(2).run(train_with_overrides) == [expected] * 2


def evaluate_around_fit(density: float | None) -> Any:
    strategy = (
        DDPStrategy() if density is None else DCTStrategy(compress="gradients", density=density)
    )
    module = Module()
    trainer = trainer_for(strategy, num_sanity_val_steps=1, val_check_interval=5)
    results = []
    for _ in range(2):
        results += [trainer.validate(module, loader(3, 40, 8), verbose=False)[0]["val_loss"]]
        results += [trainer.test(module, loader(3, 40, 8), verbose=False)[0]["test_loss"]]
        # Ranks may have different numbers of batches to predict.
        results += [torch.cat(trainer.predict(module, loader(2 + rank(), 40, 8))).sum().item()]
        if len(results) == 3:
            trainer.fit(module, loader(20, 40, 8), loader(3, 40, 8))
    return results


@pytest.mark.parametrize("density", [1.0, 0.2])
def test_validate_test_and_predict_around_fit(ranks: Any, density: float) -> None:
    """Oracle: DDPStrategy's figures before fit, and after it too at density 1.0."""
    theirs = ranks(2).run(evaluate_around_fit, None)
    ours = ranks(2).run(evaluate_around_fit, density)
    for expected, results in zip(theirs, ours, strict=True):
        assert len(results) == 6
        assert results[:3] == expected[:3]
        assert (results[3:] == expected[3:]) == (density == 1.0)
        assert results[3] < results[0]


def train_normalised(with_dct: bool) -> str:
    module = Module(nn.Sequential(perceptron(out_features=8), nn.BatchNorm1d(8)))
    strategy = DCTStrategy(compress="gradients", density=0.1) if with_dct else DDPStrategy()
    try:
        fit(strategy, module, 2, sync_batchnorm=True)
    except ValueError as error:
        return str(error)
    return "trained"


def test_sync_batchnorm_is_applied_as_by_ddp(ranks: Any) -> None:
    """Oracle: DDPStrategy. torch has SyncBatchNorm for GPUs only, so on CPU both end in torch's own
    error.
    """
    theirs = ranks(2).run(train_normalised, False)
    ours = ranks(2).run(train_normalised, True)
    assert ours == theirs
    assert ours[0].startswith("SyncBatchNorm" if DEVICE.type == "cpu" else "trained")


def train_alone(density: float | None) -> Run:
    return fit(
        DDPStrategy() if density is None else DCTStrategy(compress="gradients", density=density),
        Module(),
        12,
        barebones=True,
    )


def test_one_rank_trains_as_ddp(ranks: Any) -> None:
    """Oracle: DDPStrategy on one rank, bitwise: there is nobody to save bytes for."""
    (theirs,), (ours,) = ranks(1).run(train_alone, None), ranks(1).run(train_alone, 0.1)
    assert_weights_equal(theirs.weights, ours.weights)
    assert ours.totals.bytes_sent == 0
    assert ours.synchronisations == 12
