"""Networks called with keywords: the same in one process and in a pipeline, and what cannot be
handed over.
"""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed.training import message_of, trainer_for
from lightning_dct import DCTPipelineStrategy, SplitPoint, SplitSequential, subspace
from pipeline.split_models import (
    BATCH_SIZE,
    SplitModule,
    batches,
    replica,
    strategy_for,
    train,
    train_alone,
    worst,
)
from pipeline.test_trainer import EVALUATED, expected_validation, ragged

INT8 = {"density": 0.2, "forward_format": "int8", "refresh_every": 2}


class Start(nn.Module):
    """The first piece: gated by a mask that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(40, 24)

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = torch.tanh(self.layer(inputs))
        return hidden if mask is None else hidden * mask[:, None]


class Reader(nn.Module):
    """A later piece: reads tokens beside what arrives."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 24)
        self.layer = nn.Linear(24, outputs)

    def forward(self, hidden: Tensor, tokens: Tensor, *, mask: Tensor) -> Tensor:
        return self.layer(
            torch.tanh(hidden + (self.embedding(tokens) * mask[:, None, None]).mean(1))
        )


class ReadingModule(SplitModule):
    """A SplitModule whose pieces read integer tokens ``[rows, 5]`` and a bool mask ``[rows]``."""

    def __init__(
        self, pieces: int = 2, split: dict[str, Any] | None = None, *arguments: Any, **settings: Any
    ) -> None:
        super().__init__(pieces, split, *arguments, **settings)
        with torch.random.fork_rng():
            torch.manual_seed(4)
            children: OrderedDict[str, nn.Module] = OrderedDict(start=Start())
            for piece in range(1, pieces):
                children[f"split_{piece}"] = SplitPoint(**(split or EVALUATED))
                children[f"reader_{piece}"] = Reader(8 if piece == pieces - 1 else 24)
            self.network = SplitSequential(children)

    def context(self, inputs: Tensor) -> dict[str, Tensor]:
        return {
            "tokens": (inputs[:, :5] > 0).long() + (inputs[:, :5] > 1),
            "mask": inputs[:, 5] > -1,
        }

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return (self.network(inputs, **self.context(inputs)) - targets).square().mean()


@pytest.mark.parametrize(
    ("world", "schedule", "pieces"), [(2, "interleaved_1f1b", 4), (4, "1f1b", 2)]
)
def test_keywords_reach_the_pieces_that_name_them(
    ranks: Any, world: int, schedule: str, pieces: int
) -> None:
    """Oracle: one process, micro-batch by micro-batch: losses and weights to the last bit."""
    told = ranks(world).run(train_reading, schedule, pieces)
    losses, weights = train_alone(pieces, INT8, width=world // 2, make=ReadingModule)
    for rank, (found, trained) in enumerate(told):
        assert found == losses[rank // 2]
        assert worst(trained, weights) == 0.0
    blind, _ = train_alone(pieces, INT8, make=Blindfolded)
    assert blind[0] != losses[0]


def train_reading(schedule: str, pieces: int) -> tuple[list[float], dict[str, Tensor]]:
    run = train(2, schedule, pieces, INT8, make=ReadingModule)
    return run.losses, run.weights


class Blindfolded(ReadingModule):
    def context(self, inputs: Tensor) -> dict[str, Tensor]:
        return {name: torch.zeros_like(value) for name, value in super().context(inputs).items()}


def validate_reading(counts: list[int]) -> tuple[dict[str, float], dict[str, Tensor]]:
    module = ReadingModule(2, EVALUATED)
    trainer = trainer_for(strategy_for(2, density=1.0))
    trainer.fit(module, batches(2, 2))
    (after,) = trainer.validate(module, ragged(counts[replica(2)], 2), verbose=False)
    return after, module.state_dict()


def test_evaluation_cuts_keywords_like_the_input(ranks: Any) -> None:
    """Oracle: the model in one process, on the same parts of ragged batches."""
    told = ranks(2).run(validate_reading, [3])
    module = ReadingModule(2, EVALUATED)
    module.load_state_dict(told[0][1])
    expected = expected_validation(
        module, [3], lambda inputs: module.network(inputs, **module.context(inputs))
    )
    for after, _ in told:
        assert after["val/mean"] == pytest.approx(expected["val/mean"], rel=1e-6)
        assert after["val/rows"] == expected["val/rows"]


class Wrong(ReadingModule):
    """Calls its network wrongly."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        if fault == "plain":
            self.network = nn.Sequential(nn.Linear(40, 24), SplitPoint(), nn.Linear(24, 8))
        elif fault == "anchor":
            self.network = nn.Sequential(
                nn.Linear(40, 24), *subspace(24, 4, num_tokens=3), nn.Linear(24, 8)
            )

    def context(self, inputs: Tensor) -> dict[str, Tensor]:
        found = {} if self.fault == "anchor" else super().context(inputs)
        if self.fault == "missing":
            del found["tokens"]
        elif self.fault == "unknown":
            found["masks"] = found["mask"]
        elif self.fault == "gradient":
            found["mask"] = torch.ones(len(inputs), requires_grad=True)
        elif self.fault == "random":
            found["tokens"] = torch.randint(
                0,
                3,
                found["tokens"].shape,
                generator=torch.Generator().manual_seed(self.global_rank),
            )
        return found


FAULTS = {
    "missing": (
        "The forward of 'reader_1' (Reader) takes 'tokens', which the call of the network does not"
        " give"
    ),
    "unknown": "No child of the SplitSequential has a forward that names 'masks'",
    "gradient": "called with 'mask' as a keyword, a tensor that requires a gradient",
    "plain": "it is a Sequential, which takes one input. Make it a `lightning_dct.SplitSequential`",
    "anchor": "(Anchored) takes 'tokens', which the call of the network does not give",
    "random": "called the network with different keyword arguments in `training_step`",
}


def fit_wrongly() -> dict[str, str]:
    return {
        fault: message_of(
            trainer_for(DCTPipelineStrategy(stages=2)).fit, Wrong(fault), batches(1, 2)
        )
        for fault in FAULTS
    }


def test_wrong_calls_are_named_on_every_rank(ranks: Any) -> None:
    """Oracle: the messages above, on both ranks, before anything waits."""
    for told in ranks(2).run(fit_wrongly):
        for fault, said in FAULTS.items():
            assert said in told[fault], fault


def test_one_process_names_wrong_calls_too() -> None:
    network = ReadingModule().network
    inputs = torch.randn(BATCH_SIZE, 40)
    with pytest.raises(
        TypeError, match=r"'reader_1' \(Reader\) takes 'tokens'.*given by keyword: 'mask'"
    ):
        network(inputs, mask=torch.ones(BATCH_SIZE))
    with pytest.raises(TypeError, match=r"names 'inputs' after its first parameter"):
        network(
            inputs,
            tokens=torch.zeros(BATCH_SIZE, 5).long(),
            mask=torch.ones(BATCH_SIZE),
            inputs=inputs,
        )


class TakesAll(nn.Module):
    def forward(self, inputs: Tensor, **context: Tensor) -> Tensor:
        return inputs + sum(context.values())


@pytest.mark.parametrize(
    "wrap", [lambda child: child, lambda child: torch.compile(child, backend="eager")]
)
def test_keywords_go_through_what_contains_the_child(wrap: Any) -> None:
    """Oracle: by hand.

    Plain children, nested SplitSequentials, compiled children and those with ``**keywords``.
    """
    network = ReadingModule().network
    context = {"tokens": torch.ones(BATCH_SIZE, 5).long(), "mask": torch.ones(BATCH_SIZE)}
    inputs = torch.randn(BATCH_SIZE, 40)
    nested = SplitSequential(network[0], nn.Identity(), SplitSequential(wrap(network[2])))
    assert torch.equal(
        nested(inputs, **context), network[2](network[0](inputs, context["mask"]), **context)
    )
    assert float(SplitSequential(wrap(TakesAll()), nn.Identity())(torch.ones(()), a=1, b=2)) == 4.0


def test_slices_keep_the_class_and_plain_calls_work() -> None:
    """Oracle: nn.Sequential's own behaviour."""
    network = SplitSequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    inputs = torch.randn(4, 3)
    assert isinstance(network[:2], SplitSequential)
    assert torch.equal(network(inputs), nn.Sequential(*network)(inputs))
    assert list(network.state_dict()) == list(nn.Sequential(*network).state_dict())
