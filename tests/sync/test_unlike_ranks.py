"""Ranks whose data differ: they train on the shared weights where they pull apart, and are told;
others are not.
"""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from distributed.training import rank
from lightning_dct import Updates

STEPS = 130
CLASSES = 6
INPUTS = 12
RANKS = 2
NOISE = 4.0


def train(has_own_classes: bool, density: float) -> tuple[list[str], int, float, float]:
    """Classify noisy points; the warnings, the residuals held back, and both losses, of own and of
    dense training.
    """
    losses = []
    for is_dense in (False, True):
        torch.manual_seed(0)
        centres = 2.0 * torch.randn(CLASSES, INPUTS)
        model = nn.Sequential(nn.Linear(INPUTS, 24), nn.Tanh(), nn.Linear(24, CLASSES))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        made = torch.Generator().manual_seed(rank())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            updates = (
                None if is_dense else Updates(model, optimizer, local_steps=1, density=density)
            )
            for _ in range(STEPS):
                labels = torch.randint(CLASSES, (16,), generator=made)
                if has_own_classes:
                    labels -= labels % RANKS - rank()
                points = centres[labels] + NOISE * torch.randn(16, INPUTS, generator=made)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(points), labels).backward()
                for weight in model.parameters() if is_dense else ():
                    torch.distributed.all_reduce(weight.grad)
                    weight.grad /= RANKS
                optimizer.step()
        if updates is not None:
            told = [str(one.message) for one in caught if "different kinds" in str(one.message)]
            held = len(updates.synchronizer.weights.held)
            updates.close()
        labels = torch.arange(CLASSES).repeat(200)
        points = centres[labels] + NOISE * torch.randn(
            len(labels), INPUTS, generator=torch.Generator().manual_seed(9)
        )
        losses.append(float(nn.functional.cross_entropy(model(points), labels)))
    return told, held, *losses


def test_ranks_with_classes_of_their_own_are_told_and_end_near_ddp(ranks: Any) -> None:
    """Oracle: dense training."""
    (told, held, loss, dense), _ = ranks(RANKS).run(train, True, 0.2)
    (message,) = told
    assert "Shuffle the data" in message
    assert held == 4
    assert loss < 1.05 * dense


def test_ranks_with_data_alike_are_not_told(ranks: Any) -> None:
    (told, held, loss, dense), _ = ranks(RANKS).run(train, False, 0.2)
    assert not told
    assert not held
    assert loss < 1.05 * dense


@pytest.mark.parametrize("has_own_classes", [True, False])
def test_with_everything_sent_the_loss_is_that_of_ddp(ranks: Any, has_own_classes: bool) -> None:
    (_, _, loss, dense), _ = ranks(RANKS).run(train, has_own_classes, 1.0)
    assert loss == pytest.approx(dense, rel=0.1)
