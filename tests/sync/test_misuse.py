"""What cannot work is refused by the name of its setting; what strangers bring trains all the
same.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed.resuming import SaveAndStop
from distributed.training import (
    Module,
    Run,
    assert_replicas_equal,
    fit,
    loader,
    message_of,
    perceptron,
    rank,
    trainer_for,
    warnings_of,
    weights_of,
)
from lightning_dct import DCTStrategy
from lightning_dct.compress.codec import name_broken_sender
from methods import ErrorAveraging


def refused(folder: Path) -> list[str]:
    messages = [message_of(fit, DCTStrategy(), Module(), 12, callbacks=[ErrorAveraging(5)])]
    for ours, theirs in (("updates", "gradients"), ("gradients", "updates")):
        path = folder / f"{theirs}.ckpt"
        trainer = trainer_for(DCTStrategy(compress=theirs), callbacks=[SaveAndStop(path, 6)])
        trainer.fit(Module(), loader(12, 40, 8))
        messages.append(
            message_of(fit, DCTStrategy(compress=ours), Module(), 12, ckpt_path=str(path))
        )
        fit(DCTStrategy(compress=ours, missing_state="reset"), Module(), 12, ckpt_path=str(path))
    return messages


class Partly(Module):
    """Has a parameter that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))


def train_partly() -> str:
    return message_of(fit, DCTStrategy(compress="gradients"), Partly(), 12)


def test_unused_parameters_name_this_strategy(ranks: Any) -> None:
    """Lightning's own message would lead to plain DDP."""
    for told in ranks(2).run(train_partly):
        assert "'dct_find_unused_parameters_true'" in told
        assert "`strategy=DCTStrategy(find_unused_parameters=True)`" in told


class Unwrapping(Module):
    """Reaches for the model inside a wrapper, as code for ``ddp`` does."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.model.module.zero_grad()


def reach_for_the_module(settings: dict[str, Any]) -> str:
    if settings:  # wrapped as under `ddp`
        return str(fit(DCTStrategy(**settings), Unwrapping(), 3) and "")
    return message_of(fit, DCTStrategy(), Unwrapping(), 3)


def test_a_model_that_is_not_wrapped_is_told(ranks: Any) -> None:
    for told in ranks(2).run(reach_for_the_module, {}):
        assert told.startswith(
            "'Unwrapping' object has no attribute 'module'. `DCTStrategy` wraps no model"
        )
        assert "Write `trainer.lightning_module`" in told
    assert ranks(2).run(reach_for_the_module, {"compress": "gradients"}) == ["", ""]


class Unwritable(Module):
    """Has a tensor that no exchange can write."""

    def __init__(self, case: str) -> None:
        super().__init__()
        small = torch.eye(3)
        if case == "sparse parameter":
            self.model.adjacency = nn.Parameter(small.to_sparse(), requires_grad=False)
        elif case == "expanded parameter":
            self.model.shift = nn.Parameter(torch.ones(1).expand(3), requires_grad=False)
        else:
            if case == "advised for updates":
                self.model.register_buffer("adjacency", small.to_sparse())
            self.model.plain = small.to_sparse()
            self.model.register_buffer(
                "shift", torch.ones(1).expand(3) if "expanded" in case else torch.ones(3)
            )


UNWRITABLE = {
    "sparse parameter": ["The parameter 'model.adjacency' is a sparse tensor", "`register_buffer`"],
    "expanded parameter": [
        "Several entries of the parameter 'model.shift' are one number in memory",
        "`clone()`",
    ],
    "expanded buffer": [
        "Several entries of the buffer 'model.shift' are one number in memory",
        "`clone()`",
    ],
}


def train_unwritable(case: str, settings: dict[str, Any]) -> str:
    if case in UNWRITABLE:
        return message_of(fit, DCTStrategy(**settings), Unwritable(case), 3)
    trainer_for(DCTStrategy(**settings)).fit(Unwritable(case), loader(3, 40, 8))
    return ""


@pytest.mark.parametrize("settings", [{}, {"compress": "gradients"}])
def test_tensors_that_cannot_be_written_are_named(ranks: Any, settings: dict[str, Any]) -> None:
    """Oracle: the name, and that what the message advises trains."""
    for case, words in UNWRITABLE.items():
        for told in ranks(2).run(train_unwritable, case, settings):
            for some in words:
                assert some in told
    advised = "advised for gradients" if settings else "advised for updates"
    assert ranks(2).run(train_unwritable, advised, settings) == ["", ""]


class Late(Module):
    """Makes a parameter after it has been set up for training."""

    def on_train_start(self) -> None:
        self.model.extra = nn.Parameter(torch.ones(7, 30))
        self.trainer.optimizers[0].add_param_group({"params": [self.model.extra]})

    def loss(self, batch: Any) -> Any:
        return super().loss(batch) + self.model.extra.square().mean()


def add_late() -> str:
    return message_of(fit, DCTStrategy(), Late(perceptron(), torch.optim.SGD, lr=0.1), 12)


def test_a_parameter_that_comes_late_is_named_by_its_shape(ranks: Any) -> None:
    for message in ranks(2).run(add_late):
        assert (
            "A parameter of shape [7, 30] was made after synchronisation had been set up" in message
        )


def test_what_does_not_go_with_updates_is_refused(ranks: Any, tmp_path: Path) -> None:
    for averaging, gradients, updates in ranks(2).run(refused, tmp_path):
        assert "`DCTStrategy(compress='gradients')`, or remove the callback" in averaging
        assert "was saved with `compress='gradients'`" in gradients
        assert "was saved with `compress='updates'`" in updates


def continue_from_all_gradients(path: Path) -> Run:
    """With updates, from a run that has sent whole gradients."""
    plain = DCTStrategy(compress="gradients", density=1.0)
    trainer_for(plain, callbacks=[SaveAndStop(path, 6)]).fit(Module(), loader(12, 40, 8))
    return fit(DCTStrategy(local_steps=2), Module(), 12, ckpt_path=str(path))


def test_updates_continue_where_nothing_has_been_held_back(ranks: Any, tmp_path: Path) -> None:
    runs = ranks(2).run(continue_from_all_gradients, tmp_path / "plain.ckpt")
    assert_replicas_equal(runs)
    assert all(run.totals.steps == 12 for run in runs)


class Strange(nn.Module):
    """Complex weights, a tensor without entries, one that is never used, and one with another
    layout in memory.
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.spectrum = nn.Parameter(torch.randn(40, 40, dtype=torch.complex64) / 40)
            self.empty = nn.Parameter(torch.empty(0))
            self.unused = nn.Parameter(torch.ones(300))
            self.image = nn.Conv2d(1, 8, (5, 8)).to(memory_format=torch.channels_last)
            self.last = nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mixed = torch.view_as_real(inputs.to(torch.complex64) @ self.spectrum).sum(-1)
        return self.last(self.image(mixed.view(-1, 1, 5, 8)).flatten(1)) + self.empty.sum()


def train_strange(compress: str) -> tuple[Run, torch.Tensor]:
    more: dict[str, Any] = (
        {"find_unused_parameters": True} if compress == "gradients" else {"warmup_steps": 0}
    )
    settings: dict[str, Any] = {"compress": compress, "density": 0.3, **more}
    module = Module(Strange(), torch.optim.SGD, lr=0.05)
    if compress == "updates":  # DistributedDataParallel takes no such parameters
        for kind in (torch.float8_e4m3fn, torch.uint16):
            quantised = nn.Parameter(torch.full((3, 3), 7.0 + rank()).to(kind), requires_grad=False)
            module.model.register_parameter(f"of {kind}".replace(".", " "), quantised)
    before = module.model.spectrum.detach().clone()
    run = fit(DCTStrategy(**settings), module, 40)
    # The pipe to the test takes no tensors of these kinds either.
    run.weights = {
        name: one.view(torch.uint8) if "of torch" in name else one
        for name, one in run.weights.items()
    }
    return run, (module.model.spectrum.detach() - before).abs()


@pytest.mark.parametrize("compress", ["updates", "gradients"])
def test_strange_parameters_train(ranks: Any, compress: str) -> None:
    """Oracle: all complex entries have moved, in both of their parts; replicas are equal."""
    results = ranks(2).run(train_strange, compress)
    assert_replicas_equal([run for run, _ in results])
    assert int((results[0][1] > 0).sum()) > 0.9 * 1600


def train_shortly(steps: int) -> tuple[bool, list[str]]:
    strategy = DCTStrategy(local_steps=4, warmup_steps=0)
    module = Module()
    begun = weights_of(module)
    said = [
        one
        for one in warnings_of(fit, strategy, module, steps)
        if "before its first exchange" in one
    ]
    return all(
        torch.equal(weights, begun[name]) for name, weights in weights_of(module).items()
    ), said


def test_a_run_that_ends_before_its_first_exchange_says_so(ranks: Any) -> None:
    """Oracle: the weights that it began with."""
    told = ranks(2).run(train_shortly, 3)
    assert [same for same, _ in told] == [True, True]
    assert "ended after 3 optimizer steps" in told[0][1][0]
    assert "Lower `local_steps` (4 here)" in told[0][1][0]
    assert ranks(2).run(train_shortly, 4) == [(False, [])] * 2
    assert ranks(1).run(train_shortly, 3) == [(False, [])]


def break_one_rank(compress: str) -> list[str]:
    class Broken(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.global_rank == 1 and batch_idx == 5 else loss

    name_broken_sender.cache_clear()
    strategy = DCTStrategy(compress=compress, density=0.2)
    module = Broken(perceptron(), torch.optim.SGD, lr=0.01)
    return [one for one in warnings_of(fit, strategy, module, 20) if "infinite or NaN" in one]


@pytest.mark.parametrize(("compress", "what"), [("updates", "Updates"), ("gradients", "Gradients")])
def test_a_rank_whose_loss_is_nan_is_named_once(ranks: Any, compress: str, what: str) -> None:
    (said, nothing) = ranks(2).run(break_one_rank, compress)
    (of_rank_1,) = (sentence for sentence in said if "rank 1" in sentence)
    assert of_rank_1.startswith(f"{what} from rank 1 of the process")
    assert not nothing
