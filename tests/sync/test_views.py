"""One stack says whose weights and buffers are in the model, on every path."""

import torch
from torch import nn

from lightning_dct.sync.buffers import Buffers
from lightning_dct.sync.shared_weights import SharedWeights
from lightning_dct.sync.views import View, Views

OWN = 2.0
SHARED = 1.0


class Model:
    """One weight and one buffer, of which this rank has its own."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.full((3,), SHARED))
        self.buffer = torch.full((3,), OWN)
        self.weights = SharedWeights()
        self.weights.adopt("weight", self.weight)
        self.weight.data.fill_(OWN)
        self.buffers = Buffers(lambda: {"buffer": self.buffer})
        self.views = Views(self.weights, self.buffers)
        self.exchanges = 0

    def exchange(self) -> None:
        self.buffer.fill_(SHARED)
        self.exchanges += 1

    @property
    def has(self) -> tuple[float, float]:
        """The weight and the buffer that are in the model."""
        return float(self.weight[0]), float(self.buffer[0])


def test_the_last_view_that_closes_gives_back_what_training_had() -> None:
    model = Model()
    with model.views.shared(View.HOOKS):
        assert model.has == (SHARED, OWN)
        with model.views.shared(View.EVALUATION, model.exchange):
            assert model.has == (SHARED, SHARED)
            with model.views.shared(View.EVALUATION, model.exchange):
                pass
            with model.views.shared(View.SAVE):
                pass
            assert model.has == (SHARED, SHARED)
        assert model.has == (SHARED, OWN)
    assert model.has == (OWN, OWN)
    assert model.exchanges == 1


def test_views_may_close_in_any_order() -> None:
    """As Lightning's hooks come: a view of hooks that is opened within a save ends after it."""
    model = Model()
    model.views.open(View.SAVE)
    model.views.open(View.HOOKS)
    model.views.close(View.SAVE)
    assert model.has == (SHARED, OWN)
    model.views.close(View.HOOKS)
    assert model.has == (OWN, OWN)
    model.views.close(View.HOOKS)
    assert model.has == (OWN, OWN)


def test_training_closes_all_views() -> None:
    """Also those whose contexts end later."""
    model = Model()
    with (
        model.views.shared(View.EVALUATION, model.exchange),
        model.views.shared(View.SAVE),
    ):
        model.views.continue_training()
        assert model.has == (OWN, OWN)
        model.weight.data.fill_(3.0)
        model.buffer.fill_(3.0)
    assert model.has == (3.0, 3.0)
    assert not model.views.are_open


def test_parameters_that_come_while_a_view_is_open_are_shown_too() -> None:
    model = Model()
    late = nn.Parameter(torch.full((2,), SHARED))
    with model.views.shared(View.LOAD):
        model.weights.adopt("late", late)
        late.data.fill_(OWN)
        model.views.follow()
        assert late.tolist() == [SHARED, SHARED]
        assert model.has == (SHARED, OWN)
    assert late.tolist() == [OWN, OWN]


def test_a_step_that_nothing_has_interrupted_continues_nothing() -> None:
    """Oracle: what is counted; weights are compared only after a view."""
    model = Model()
    counted = 0
    continue_training = model.weights.continue_training

    def count() -> None:
        nonlocal counted
        counted += 1
        continue_training()

    model.weights.continue_training = count  # type: ignore[method-assign]
    for _ in range(3):
        model.views.continue_training()
    assert counted == 0
    with model.views.shared(View.HOOKS):
        pass
    for _ in range(3):
        model.views.continue_training()
    assert counted == 1


def test_a_view_that_stays_open_is_not_closed_by_an_evaluation_around_it() -> None:
    """As `Updates.close` within an evaluation: the buffers of all ranks stay."""
    model = Model()
    with model.views.shared(View.EVALUATION, model.exchange):
        model.views.open(View.END, model.exchange)
    assert model.has == (SHARED, SHARED)
    assert model.exchanges == 2
