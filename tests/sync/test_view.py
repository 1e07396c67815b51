"""Users see the shared weights: in validation, in callbacks, after fit; and buffers of all ranks as
one.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LambdaCallback,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from distributed.training import (
    Module,
    Run,
    State,
    Watch,
    assert_replicas_equal,
    assert_weights_equal,
    fit,
    hash_of,
    loader,
    perceptron,
    summary,
    trainer_for,
    weights_of,
)
from lightning_dct import DCTStrategy
from lightning_dct.sync.buffers import Buffers
from lightning_dct.sync.shared_weights import SharedWeights
from lightning_dct.sync.views import View, Views
from one_card import DEVICE

SETTINGS: dict[str, Any] = {"density": 0.2, "local_steps": 4, "warmup_steps": 3}


def normalised() -> nn.Module:
    return nn.Sequential(
        perceptron(out_features=16), nn.BatchNorm1d(16), perceptron(in_features=16)
    )


class Validated(Module):
    """Keeps hashes of the weights: in training steps, when a validation begins, in it, and when it
    ends.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.seen: dict[str, list[str]] = {"train": [], "start": [], "validation": [], "end": []}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen["train"].append(hash_of(self))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["validation"].append(hash_of(self))
        super().validation_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        self.seen["start"].append(hash_of(self))

    def on_validation_end(self) -> None:
        self.seen["end"].append(hash_of(self))


def validate_within_fit() -> tuple[dict[str, list[str]], str, float]:
    module = Validated(normalised(), torch.optim.SGD, lr=0.05, momentum=0.9)
    trainer = trainer_for(DCTStrategy(**SETTINGS), val_check_interval=5, num_sanity_val_steps=1)
    trainer.fit(module, loader(20, 40, 8), loader(3, 40, 8))
    after = hash_of(module)
    (scores,) = trainer.validate(module, loader(3, 40, 8), verbose=False)
    return module.seen, after, scores["val_loss"]


def test_validations_see_the_same_weights_on_every_rank(ranks: Any) -> None:
    """Oracle: hashes of weights and buffers, which training sees differ after the first step."""
    (one, after, score), (other, other_after, other_score) = ranks(2).run(validate_within_fit)
    for moment in ("start", "validation", "end"):
        assert one[moment] == other[moment]
        assert len(set(one[moment])) == 5
    assert not set(one["train"][1:]) & set(other["train"][1:])
    assert after == other_after
    assert score == other_score


AVERAGING = {
    "WeightAveraging": WeightAveraging,
    "EMA": lambda: EMAWeightAveraging(decay=0.9),
    "SWA": lambda: StochasticWeightAveraging(0.05, swa_epoch_start=2),
}


def train_averaging(name: str, model: str) -> Run:
    module = Module(normalised() if model == "normalised" else None, torch.optim.SGD, lr=0.1)
    return fit(DCTStrategy(**SETTINGS), module, 6, callbacks=[AVERAGING[name]()], max_epochs=4)


@pytest.mark.parametrize(
    ("name", "model"), [("WeightAveraging", "normalised"), ("EMA", "plain"), ("SWA", "normalised")]
)
def test_averages_are_of_the_shared_weights(ranks: Any, name: str, model: str) -> None:
    """Oracle: each rank averages by itself, and all arrive at the same, which is not the weights of
    the last step.
    """
    if (name, model, DEVICE.type) == ("WeightAveraging", "normalised", "cuda"):
        pytest.skip(
            "torch's average of weights refuses whole numbers on a GPU, such as those of a"
            " BatchNorm"
        )
    runs = ranks(2).run(train_averaging, name, model)
    for parameter, weights in runs[0].weights.items():
        # SWA makes those anew, each rank of its own batches.
        if "running" not in parameter or name != "SWA":
            assert torch.equal(weights, runs[1].weights[parameter]), parameter


def overwrite(hook: str, epoch: int) -> Any:
    """Set a tensor in a hook, as whoever loads weights in the middle of training does; what
    training goes on with.
    """
    found: list[State] = []

    def write(trainer: Trainer, module: Any, *arguments: Any) -> None:
        if trainer.current_epoch == epoch and (hook != "on_train_batch_end" or arguments[-1] == 5):
            module.model.first.weight.data.fill_(0.5)

    def look(trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.current_epoch == 1:
            found.append(weights_of(module))

    callbacks = [LambdaCallback(**{hook: write}), LambdaCallback(on_train_batch_start=look)]
    run = fit(
        DCTStrategy(**SETTINGS),
        Module(None, torch.optim.SGD, lr=0.01),
        6,
        callbacks=callbacks,
        max_epochs=2,
    )
    return found[0]["model.first.weight"], run


@pytest.mark.parametrize(
    ("hook", "epoch"),
    [("on_train_batch_end", 0), ("on_train_epoch_end", 0), ("on_train_epoch_start", 1)],
)
def test_what_is_written_into_the_shared_weights_is_trained_on(
    ranks: Any, hook: str, epoch: int
) -> None:
    """In every way of writing: test_every_way_of_writing_is_seen."""
    results = ranks(2).run(overwrite, hook, epoch)
    for found, _ in results:
        assert bool((found == 0.5).all())
    assert_replicas_equal([run for _, run in results])


class Hooked(Module):
    """Its own hook averages its weights, sets a tensor once, or clips all of them after each step,
    as a WGAN does.
    """

    def __init__(self, clip: float | None, until_the_end: bool = False) -> None:
        super().__init__(None, torch.optim.SGD, lr=0.05)
        self.clip = clip
        self.until_the_end = until_the_end
        self.seen: list[torch.Tensor] = []
        self.average: torch.Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(self.model.first.weight.detach().clone())
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        weight = self.model.first.weight
        self.average = (
            weight.detach().clone()
            if self.average is None
            else self.average.lerp(weight.detach(), 0.1)
        )
        if self.clip is not None:
            self.clip_all()
        elif batch_idx == 9:
            weight.data.fill_(0.123)

    def on_train_end(self) -> None:
        if self.until_the_end:
            self.clip_all()

    def clip_all(self) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-self.clip, self.clip)


def train_hooked(strategy: Any, *arguments: Any) -> Hooked:
    module = Hooked(*arguments)
    trainer_for(strategy).fit(module, loader(14, 40, 8))
    module.trainer = None
    return module


def fill_in_own_hook() -> list[Hooked]:
    return [train_hooked(strategy, None) for strategy in (DDPStrategy(), DCTStrategy(**SETTINGS))]


def test_what_the_module_writes_in_its_own_hook_is_trained_on(ranks: Any) -> None:
    """Oracle: plain DDP; and an average that each rank makes by itself is the same on all."""
    results = ranks(2).run(fill_in_own_hook)
    for plain, module in results:
        assert plain.seen[10].unique().tolist() == [torch.tensor(0.123).item()]
        assert len(module.seen[9].unique()) > 1
        # What this rank has not sent is still to come.
        assert 0 < (module.seen[10] - 0.123).abs().max() < 0.05
    (_, one), (_, other) = results
    assert torch.equal(one.average, other.average)
    assert not torch.equal(one.seen[12], other.seen[12])


def clip_in_own_hook(overlap_steps: int) -> Hooked:
    return train_hooked(
        DCTStrategy(**SETTINGS, overlap_steps=overlap_steps), 0.05, overlap_steps > 0
    )


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_a_module_that_clips_its_weights_ends_with_clipped_weights(
    ranks: Any, overlap_steps: int
) -> None:
    """With updates in flight, which arrive after the last batch, it has to clip in `on_train_end`
    as well.
    """
    one, other = ranks(2).run(clip_in_own_hook, overlap_steps)
    for name, weights in weights_of(one).items():
        assert torch.equal(weights, weights_of(other)[name]), name
        assert weights.abs().max() <= torch.tensor(0.05), name
    first = weights_of(one)["model.first.weight"]
    assert (first.abs() < 0.05).any()
    assert not torch.equal(first, perceptron().first.weight.clamp(-0.05, 0.05))


@pytest.mark.parametrize("way", ["data", "in place"])
def test_what_is_written_moves_own_weights_by_as_much(way: str) -> None:
    weights = SharedWeights()
    views = Views(weights, Buffers())
    parameter = nn.Parameter(torch.tensor([0.5, -2.0, 0.25]))
    weights.adopt("one", parameter)
    weights.own("one").copy_(torch.tensor([0.75, -1.5, 0.5]))
    for _ in range(2):  # the second time it changes nothing
        with views.shared(View.HOOKS), torch.no_grad():
            (parameter.data if way == "data" else parameter).clamp_(-1.0, 1.0)
        assert parameter.tolist() == [0.75, -0.5, 0.5]
        assert weights.shared("one").tolist() == [0.5, -1.0, 0.25]


def test_own_weights_that_are_no_numbers_are_mended_by_what_is_written() -> None:
    weights = SharedWeights()
    views = Views(weights, Buffers())
    parameter = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    weights.adopt("one", parameter)
    weights.own("one").copy_(torch.tensor([float("nan"), float("inf"), 3.5]))
    with views.shared(View.HOOKS):
        parameter.data.fill_(0.5)
    assert parameter.tolist() == [0.5, 0.5, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_what_is_written_and_taken_back_leaves_every_bit(dtype: torch.dtype) -> None:
    """Oracle: the own weights before.

    They are taken back in a later view, in part, and once training has gone on.
    """
    weights = SharedWeights()
    views = Views(weights, Buffers())
    parameter = nn.Parameter(torch.randn(1000, dtype=dtype))
    weights.adopt("one", parameter)
    own = weights.own("one").add_(torch.randn(1000, dtype=dtype) * 0.01).clone()
    kept = weights.shared("one").clone()
    other = torch.randn(1000, dtype=dtype) * 100
    for some in (slice(0, 1000), slice(300, 700)):
        for written in (other, other / 3, kept):
            with views.shared(View.HOOKS):
                parameter.data[some] = written[some]
            assert torch.equal(parameter.data, own) is (written is kept)
            assert torch.equal(weights.shared("one")[some], written[some])
    with views.shared(View.HOOKS):
        parameter.data.copy_(other)
    views.continue_training()
    with views.shared(View.HOOKS):
        parameter.data.copy_(kept)
    assert not torch.equal(parameter.data, own)
    torch.testing.assert_close(
        parameter.data, own, rtol=0, atol=2.0 if dtype == torch.bfloat16 else 1e-4
    )


@pytest.mark.parametrize(
    "way", ["data", "in place", "other memory", "negative zero", "not a number"]
)
def test_every_way_of_writing_is_seen(way: str) -> None:
    weights = SharedWeights()
    views = Views(weights, Buffers())
    parameter = nn.Parameter(torch.tensor([[0.5, -2.0], [0.0, 0.1]]).t())
    weights.adopt("one", parameter)
    weights.own("one").add_(1.0)
    entry = -0.0 if way == "negative zero" else float("nan") if way == "not a number" else 7.0
    with views.shared(View.HOOKS), torch.no_grad():
        if way == "other memory":
            parameter.data = parameter.data.clone().contiguous()
        (parameter if way == "in place" else parameter.data)[0, 1] = entry
    # A zero of the other sign is the same number.
    expected = torch.tensor([[1.5, 1.0 if way == "negative zero" else entry + 1.0], [-1.0, 1.1]])
    torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=0, equal_nan=True)


class SwapsInMode(Validated):
    """Has other weights in the model in eval mode, which it makes of the trained ones where
    Lightning changes the mode.

    Args:
        way: In Lightning's ``hooks``, or in ``train``; both keep what was there. Or ``merge`` in
            ``train``, as LoRA: to add and subtract may cost the last bits.
    """

    def __init__(self, way: str) -> None:
        super().__init__(None, torch.optim.AdamW, lr=0.01)
        self.way = way
        self.kept = None

    def on_validation_model_eval(self) -> None:
        self.swap(False, "hooks")
        super().on_validation_model_eval()

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()
        self.swap(True, "hooks")

    on_test_model_eval = on_predict_model_eval = on_validation_model_eval
    on_test_model_train = on_validation_model_train

    def train(self, mode: bool = True) -> Any:
        if self.way == "train" and mode != self.training:
            self.swap(mode, "train")
        if self.way == "merge" and mode != self.training:
            self.model.first.weight.data.mul_(0.25 if mode else 4.0)  # exact in either direction
        return super().train(mode)

    def swap(self, mode: bool, where: str) -> None:
        if where != self.way:
            return
        if mode:
            self.model.load_state_dict(self.kept)
        else:
            self.kept = weights_of(self.model)
            self.model.load_state_dict({name: weight * -2.0 for name, weight in self.kept.items()})

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["validation"].append(hash_of(self))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.swapped = self.kept is None or torch.equal(self.model.gain, -2.0 * self.kept["gain"])
        super().validation_step(batch, batch_idx)


def swap_in_mode(way: str) -> Any:
    module = SwapsInMode(way)
    trainer = trainer_for(DCTStrategy(**SETTINGS), val_check_interval=4, num_sanity_val_steps=1)
    trainer.fit(module, loader(12, 40, 8), loader(2, 40, 8))
    norm = trainer.strategy.updates.norm()
    for run in (trainer.test, trainer.validate):
        run(module, loader(2, 40, 8), verbose=False)
    weights = weights_of(module)
    # Lightning has no hook that takes back what this one puts in.
    trainer.predict(module, loader(2, 40, 8))
    return module.seen, module.swapped, weights, norm


@pytest.mark.parametrize("way", ["hooks", "train", "merge"])
def test_weights_that_eval_mode_puts_in_are_validated(ranks: Any, way: str) -> None:
    """Oracles: the same run without, bit for bit; and what each validation sees, on all ranks
    alike.
    """
    results = ranks(2).run(swap_in_mode, way)
    for (seen, swapped, weights, norm), (plain, _, expected, its) in zip(
        results, ranks(2).run(swap_in_mode, "none"), strict=True
    ):
        assert swapped
        assert seen["validation"] == results[0][0]["validation"]
        assert not set(seen["validation"]) & set(plain["validation"])
        assert_weights_equal(weights, expected)
        assert norm == its


class SwappedIn(Callback):
    """Has an average in the model from each validation to the next epoch's start, unless it only
    makes it.

    Args:
        hooks: Where it comes in and goes.
    """

    def __init__(self, hooks: tuple[str, str] | None) -> None:
        self.average: State | None = None
        self.kept: State | None = None
        for hook, act in zip(hooks or (), (self.swap_in, self.take_back), strict=hooks is not None):
            setattr(self, hook, act)

    def swap_in(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.kept = weights_of(pl_module)
        before = self.average or self.kept
        self.average = {
            name: before[name].lerp(weights, 0.1) for name, weights in self.kept.items()
        }
        pl_module.load_state_dict({name: weights * 0.9 for name, weights in self.average.items()})

    def take_back(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.kept is not None:
            pl_module.load_state_dict(self.kept)
            self.kept = None


def swap(hooks: tuple[str, str] | None) -> Run:
    module = Validated(None, torch.optim.AdamW, lr=0.01)
    strategy = DCTStrategy(**SETTINGS)
    callback = SwappedIn(hooks)
    watch = Watch(look=lambda trainer: trainer.strategy.updates.norm())
    trainer = trainer_for(strategy, callbacks=[watch, callback], max_epochs=5)
    trainer.fit(module, loader(6, 40, 8), loader(2, 40, 8))
    return summary(strategy, module, watch)


@pytest.mark.parametrize(
    "hooks",
    [
        ("on_validation_start", "on_train_epoch_start"),
        ("on_validation_epoch_start", "on_validation_epoch_end"),
        ("on_train_epoch_end", "on_train_batch_start"),
    ],
)
def test_an_average_that_is_swapped_in_and_taken_back_is_nothing(
    ranks: Any, hooks: tuple[str, str]
) -> None:
    """Oracle: the same run without the average, bit for bit."""
    for run, expected in zip(ranks(2).run(swap, hooks), ranks(2).run(swap, None), strict=True):
        assert run.losses == expected.losses
        assert run.seen == expected.seen
        if hooks[1] == "on_validation_epoch_end":  # otherwise it is still in when training ends
            assert_weights_equal(run.weights, expected.weights)


class Lent(Module):
    """May have zeros for weights while it is validated, as averages are lent to a model; then it
    takes its own back.
    """

    def __init__(self, lends: bool) -> None:
        super().__init__()
        self.lends = lends

    def on_validation_start(self) -> None:
        if self.lends:
            self.kept = weights_of(self)
            for parameter in self.parameters():
                parameter.data.zero_()

    def on_validation_end(self) -> None:
        if self.lends:
            self.load_state_dict(self.kept)


def lend(lends: bool, folder: Path) -> tuple[dict[str, torch.Tensor], float]:
    # Callbacks come before the module's own hook, so this one saves what is lent.
    saver = ModelCheckpoint(folder, "{step}", save_top_k=-1, save_on_train_epoch_end=False)
    trainer = trainer_for(
        DCTStrategy(**SETTINGS), callbacks=[saver], enable_checkpointing=True, val_check_interval=5
    )
    module = Lent(lends)
    trainer.fit(module, loader(20, 40, 8), loader(1, 40, 8))
    saved = torch.load(saver.best_model_path, weights_only=True)["state_dict"]
    return weights_of(module), sum(float(tensor.abs().sum()) for tensor in saved.values())


def test_weights_that_a_validation_and_its_checkpoint_are_lent_change_nothing(
    ranks: Any, tmp_path: Path
) -> None:
    lent, kept = (ranks(2).run(lend, lends, tmp_path / str(lends)) for lends in (True, False))
    for (weights, saved), (expected, saved_own) in zip(lent, kept, strict=True):
        assert_weights_equal(weights, expected)
        assert saved == 0 < saved_own


class TimerOnly(Watch):
    reads_weights = False


def watch(kind: type[Watch] | None) -> list[str]:
    timer = (kind or Watch)()
    module = Module(None, torch.optim.SGD, lr=0.05)
    callback = timer if kind else LambdaCallback(on_train_batch_end=timer.on_train_batch_end)
    trainer_for(DCTStrategy(**SETTINGS), callbacks=[callback]).fit(module, loader(10, 40, 8))
    return timer.hashes


def test_hooks_see_the_shared_weights_unless_they_need_none(ranks: Any) -> None:
    """Oracle: the shared weights are alike on all ranks, and own weights are not."""
    for kind in (Watch, None):
        one, other = ranks(2).run(watch, kind)
        assert one == other
    one, other = ranks(2).run(watch, TimerOnly)
    assert not set(one) & set(other)


def cut_short() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    class Stop(Callback):
        def on_train_batch_start(
            self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 9:
                self.shared = {
                    name: trainer.strategy.updates.weights.shared(name).clone()
                    for name, _ in pl_module.named_parameters()
                }
                raise KeyboardInterrupt

    module = Module(None, torch.optim.Adam, lr=0.01)
    stop = Stop()
    with pytest.raises(BaseException):
        fit(DCTStrategy(**SETTINGS), module, 20, callbacks=[stop])
    return stop.shared, weights_of(module)


def test_a_fit_that_is_cut_short_leaves_the_shared_weights(ranks: Any) -> None:
    for shared, left in ranks(2).run(cut_short):
        assert_weights_equal(shared, left)


class Unsaved(Validated):
    """Fails a save before its sixth optimizer step, and goes on."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails
        self.is_failing = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.is_failing:
            raise OSError

    def optimizer_step(self, *arguments: Any) -> None:
        if self.fails and self.trainer.global_step == 5:
            self.is_failing = True
            with pytest.raises(OSError):
                self.trainer.save_checkpoint("never")
            self.is_failing = False
        super().optimizer_step(*arguments)


def fail_to_save(fails: bool, folder: Path) -> tuple[dict[str, list[str]], str]:
    saver = ModelCheckpoint(folder, save_on_train_epoch_end=False)
    settings = {
        "callbacks": [saver],
        "enable_checkpointing": True,
        "val_check_interval": 8,
        "num_sanity_val_steps": 0,
    }
    module = Unsaved(fails)
    trainer = trainer_for(DCTStrategy(**SETTINGS), **settings)
    trainer.fit(module, loader(20, 40, 8), loader(1, 40, 8))
    return module.seen, hash_of(module)


def test_a_save_that_fails_in_a_hook_changes_nothing(ranks: Any, tmp_path: Path) -> None:
    """Oracle: the same fit without it, bitwise, also what later validations see after they have
    saved.
    """
    assert ranks(2).run(fail_to_save, True, tmp_path / "1") == ranks(2).run(
        fail_to_save, False, tmp_path / "2"
    )
