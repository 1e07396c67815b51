"""Selection by magnitude times running gradient, against loops over single entries."""

import copy
import io
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dct import ShardedEmbeddingBags
from lightning_dct.activations import SplitPoint
from lightning_dct.activations.gradient_means import DECAY

BY_GRADIENT: dict[str, Any] = {"select_by": "magnitude_times_gradient"}
LOSSLESS: dict[str, Any] = {"forward_format": "fp32", "backward_format": "fp32"}
EXACT: dict[str, Any] = {**BY_GRADIENT, **LOSSLESS, "refresh_every": 1, "guard": False}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def column_of(place: tuple[int, ...], shape: tuple[int, ...], settings: dict[str, Any]) -> tuple[int, int]:
    """The group and the place in the last dimension that an entry's mean is of."""
    if settings.get("scope") != "group" or settings["group_dim"] % len(shape) == len(shape) - 1:
        return 0, place[-1]
    dim = settings["group_dim"]
    return place[dim] // (shape[dim] // (settings.get("groups") or shape[dim])), place[-1]


def step(split: SplitPoint, number: int, activations: Tensor, gradient: Tensor) -> Tensor:
    """One optimizer step; what was received."""
    split.advance(number)
    activations = activations.clone().requires_grad_()
    received = split(activations)
    received.backward(gradient)
    return received.detach()


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ((12, 7), {}),
        ((6, 4, 5), {}),
        ((6, 4, 5), {"scope": "group", "group_dim": 1}),
        ((6, 4, 5), {"scope": "group", "group_dim": 1, "groups": 2}),
        ((4, 3, 2, 5), {"scope": "group", "group_dim": 0, "groups": 2}),
        ((6, 4, 6), {"scope": "group", "group_dim": -1, "groups": 3}),
    ],
)
def test_selection_by_loop(shape: tuple[int, ...], settings: dict[str, Any]) -> None:
    """Oracle: the equations of the module's docstring, entry by entry, and sorting all scores of the tensor."""
    split = SplitPoint(density=0.3, **EXACT, **settings)
    places = list(itertools.product(*(range(length) for length in shape)))
    columns = {place: column_of(place, shape, settings) for place in places}
    means = dict.fromkeys(columns.values(), 1.0)
    slope = torch.linspace(0.2, 3.0, math.prod(shape[1:])).view(shape[1:])
    by_magnitude = 0
    for number in range(15):
        activations, gradient = normal(*shape, seed=number), normal(*shape, seed=100 + number) * slope
        received = step(split, number, activations, gradient)
        scores = {place: abs(float(activations[place])) * means[columns[place]] for place in places}
        room = math.ceil(0.3 * len(places) * (1 - 1e-12))
        kept = set(sorted(places, key=lambda place: -scores[place])[:room])
        assert {place for place in places if received[place] != 0} == kept
        by_magnitude += kept == set(sorted(places, key=lambda place: -abs(float(activations[place])))[:room])
        came: dict[tuple[int, int], list[float]] = {column: [] for column in means}
        for place in kept:
            came[columns[place]].append(abs(float(gradient[place])))
        overall = sum(map(sum, came.values())) / len(kept)
        for column, these in came.items():
            relative = sum(these) / len(these) / overall if these else 1.0
            means[column] = DECAY * means[column] + (1 - DECAY) * relative
    assert by_magnitude < 15  # the means matter
    assert split.thresholds.numel() == 1


def test_a_column_that_is_never_sent_drifts_back_to_the_mean() -> None:
    """Oracle: 1 - (1 - m) * 0.99 ** steps, and that the column is sent again in the end."""
    split = SplitPoint(density=0.5, **EXACT)
    activations, gradient = torch.ones(8, 2), torch.ones(8, 2)
    step(split, 0, torch.tensor([[1.0, 0.9]]).expand(8, 2), gradient)
    assert split.gradient_means is not None
    split.gradient_means.means[0, 1] = 0.5
    for number in range(1, 40):
        assert bool((step(split, number, activations, gradient)[:, 1] == 0).all())
    assert split.gradient_means.means[0].tolist() == pytest.approx([1.0, 1 - 0.5 * 0.99**39])
    # A little larger, the column is chosen as soon as its mean has come back far enough.
    sent = [
        bool(step(split, number, activations * torch.tensor([1.0, 1.4]), gradient)[0, 1]) for number in range(40, 60)
    ]
    assert not sent[0]
    assert sent[-1]


def test_a_gradient_counts_by_ratios_alone() -> None:
    """Oracle: the same run; a loss scale, infinite entries and steps without backward change no mask."""
    plain, scaled = SplitPoint(density=0.3, **EXACT), SplitPoint(density=0.3, **EXACT)
    slope = torch.linspace(0.2, 3.0, 7)
    for number in range(10):
        activations, gradient = normal(12, 7, seed=number), normal(12, 7, seed=100 + number) * slope
        ours = step(plain, number, activations, gradient)
        assert torch.equal(step(scaled, number, activations, gradient * 2.0**15), ours)
        for _ in range(2):
            scaled.advance(number + 1)  # nothing has come since: no second fold
    broken = SplitPoint(density=0.3, **EXACT)
    step(broken, 0, normal(12, 7), torch.full((12, 7), math.inf))
    broken.advance(1)
    assert broken.gradient_means is not None
    assert torch.equal(broken.gradient_means.means, torch.ones(1, 7))


def test_means_stay_as_they_are_during_a_step() -> None:
    """Oracle: the first forward's result again, after gradients of other micro-batches have come back."""
    split = SplitPoint(density=0.3, **BY_GRADIENT, **LOSSLESS)
    for number in range(3):
        step(split, number, normal(12, 7, seed=number), normal(12, 7) * torch.linspace(0.0, 9.0, 7))
    first = step(split, 3, normal(12, 7), normal(12, 7))
    assert torch.equal(step(split, 3, normal(12, 7), normal(12, 7)), first)


def test_evaluation_takes_no_notes() -> None:
    split = SplitPoint(density=0.3, **EXACT)
    for number in range(3):
        step(split, number, normal(12, 7, seed=number), normal(12, 7, seed=number))
    state = copy.deepcopy(split.state_dict())
    split.eval()
    split(normal(12, 7).requires_grad_()).sum().backward()
    assert all(torch.equal(state[name], value) for name, value in split.state_dict().items() if name[0] != "_")


@pytest.mark.parametrize("settings", [{}, {"scope": "group"}, {"scope": "sample"}])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(settings: dict[str, Any]) -> None:
    """Oracle: the run that is not stopped; saved after a step, when its gradients have not been folded in yet."""

    def run(split: SplitPoint, start: int, stop: int) -> list[Tensor]:
        slope = torch.linspace(0.0, 3.0, 5)
        return [
            step(split, n, normal(8, 3, 5, seed=n), normal(8, 3, 5, seed=50 + n) * slope) for n in range(start, stop)
        ]

    whole, first, second = (SplitPoint(density=0.3, exploration=0.1, **BY_GRADIENT, **settings) for _ in range(3))
    expected = run(whole, 0, 30)[13:]
    run(first, 0, 13)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert all(torch.equal(one, other) for one, other in zip(run(second, 13, 30), expected, strict=True))


def test_the_lever_may_be_moved_between_runs() -> None:
    """Oracle: strict loading either way, and thresholds that are selected anew."""
    plain, by_gradient = SplitPoint(density=0.3), SplitPoint(density=0.3, **BY_GRADIENT)
    step(plain, 0, normal(12, 7), normal(12, 7))
    step(by_gradient, 0, normal(12, 7), normal(12, 7))
    assert not any("gradient" in name for name in plain.state_dict())
    for saved, other in ((plain, {**BY_GRADIENT}), (by_gradient, {})):
        resumed = SplitPoint(density=0.3, **other)
        resumed.load_state_dict(saved.state_dict())
        assert resumed.refresh_requested
        step(resumed, 1, normal(12, 7), normal(12, 7))


def test_buffers_keep_their_identity_and_precision() -> None:
    split = SplitPoint(density=0.3, **BY_GRADIENT)
    before = [id(buffer) for buffer in split.buffers()]
    for number in range(2):
        step(split, number, normal(12, 7), normal(12, 7))
    assert [id(buffer) for buffer in split.buffers()] == before
    split.bfloat16()
    assert [buffer.dtype for buffer in split.gradient_means.buffers()] == [torch.float32, torch.float64, torch.int64]  # type: ignore[union-attr]


def test_what_cannot_work_is_refused() -> None:
    split = SplitPoint(density=0.3, **BY_GRADIENT)
    split(normal(12, 7))
    with pytest.raises(ValueError, match=r"have 1 x 8 columns.*remembers the gradients of \[1, 7\]"):
        split(normal(12, 8))
    with pytest.raises(ValueError, match=r"`split` has select_by='magnitude_times_gradient'.*Leave `select_by` out"):
        ShardedEmbeddingBags([5], 4, exchange="values", split=BY_GRADIENT)


def test_it_sends_what_the_loss_needs() -> None:
    """Oracle: a loss that reads the small half of the columns alone; by magnitude only the others would cross."""
    shares = []
    for settings in ({}, BY_GRADIENT):
        split = SplitPoint(density=0.5, exploration=0.1, **LOSSLESS, **settings)
        size = torch.tensor([2.0] * 4 + [1.0] * 4)
        for number in range(300):
            received = step(
                split, number, (normal(16, 8, seed=number).sign() * size), (size == 1).float().expand(16, 8)
            )
        shares.append(float((received[:, 4:] != 0).float().mean()))
    assert shares[0] < 0.2
    assert shares[1] > 0.8
