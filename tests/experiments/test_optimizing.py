from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.utilities.parsing import AttributeDict
from torch import nn

from nlp.optimizing import optimizer_with_cosine

SETTINGS = {"learning_rate": 0.5, "betas": (0.8, 0.99), "weight_decay": 0.1, "warmup_steps": 2}


def module(total_steps: float = 12, **settings: float | None) -> SimpleNamespace:
    layer = nn.Linear(2, 3)
    hparams = AttributeDict({**SETTINGS, "final_learning_rate_fraction": 0.1, **settings})
    trainer = SimpleNamespace(estimated_stepping_batches=total_steps)
    return SimpleNamespace(hparams=hparams, trainer=trainer, parameters=layer.parameters)


@pytest.mark.parametrize(
    ("momentum", "kind", "expected"),
    [(None, torch.optim.AdamW, {"betas": (0.8, 0.99)}), (0.9, torch.optim.SGD, {"momentum": 0.9})],
)
def test_one_optimizer_or_the_other(
    momentum: float | None, kind: type, expected: dict[str, object]
) -> None:
    """Oracle: what was asked for, with weight decay on the matrix and not on the bias."""
    optimizer = optimizer_with_cosine(module(momentum=momentum))["optimizer"]
    assert type(optimizer) is kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    for group in optimizer.param_groups:
        assert {name: group[name] for name in expected} == expected


def test_rises_then_falls_to_a_tenth() -> None:
    made = optimizer_with_cosine(module())
    optimizer = made["optimizer"]
    schedule = made["lr_scheduler"]["scheduler"]
    rates = []
    for _ in range(13):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:3] == [0.25, 0.5, 0.5]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[12] == pytest.approx(0.05)


def test_wants_an_end() -> None:
    with pytest.raises(ValueError, match=r"set trainer\.max_steps or trainer\.max_epochs"):
        optimizer_with_cosine(module(float("inf")))
