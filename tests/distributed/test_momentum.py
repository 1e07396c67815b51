"""strategy="dct" under optimizers with momentum: it rests where residuals stand in for it, and nobody else notices."""

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

import lightning_dct.fabric
from distributed.training import Module, Noise, Run, Watch, fit, perceptron, rank
from lightning_dct import DCTStrategy

COMPRESSED: dict[str, Any] = {"density": 0.05, "min_tensor_size": 1, "value_format": "fp32"}
# Of 40 x 24, 24, 24 x 8, 8 and 1 entries: each its twentieth, rounded up.
SHARE = (48 + 2 + 10 + 1 + 1) / (960 + 24 + 192 + 8 + 1)


def betas(trainer: Any) -> float:
    return trainer.optimizers[0].param_groups[0]["betas"][0]


class GrowingRate(Module):
    """Its learning rate grows over 4 / density steps, by hand."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) * SHARE / 4))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(beta1: float, momentum: str = "auto", warmup_steps: int = 0, grown_by_hand: bool = False) -> Run:
    kind = GrowingRate if grown_by_hand else Module
    module = kind(None, torch.optim.AdamW, lr=0.005, betas=(beta1, 0.99))
    strategy = DCTStrategy(**COMPRESSED, momentum=momentum, warmup_steps=warmup_steps)  # type: ignore[arg-type]
    return fit(strategy, module, 12, watch=Watch(look=betas))


def test_steps_as_without_momentum(ranks: Any) -> None:
    """Oracle: every bit of every step of AdamW with beta1 = 0 and a rate that grows; others see the user's beta1."""
    usual, without, kept = (
        ranks(2).run(train, *settings) for settings in [(0.5,), (0.0, "auto", 0, True), (0.5, "keep")]
    )
    assert usual[0].hashes == usual[1].hashes == without[0].hashes
    assert usual[0].hashes != kept[0].hashes
    assert usual[0].seen == [0.5] * 12


def test_momentum_rests_once_the_density_has_fallen(ranks: Any) -> None:
    """Oracle: the run that keeps it, equal for as long as more than one tenth is sent, and not after."""
    resting, keeping = (ranks(2).run(train, 0.9, momentum, 6)[0].hashes for momentum in ("auto", "keep"))
    same = [one == other for one, other in zip(resting, keeping, strict=True)]
    # 0.05 ** (step / 6) is 0.135 in the fifth step and 0.082 in the sixth.
    assert same == [True] * 5 + [False] * 7


def train_with_fabric(beta1: float, by_hand: bool = False) -> list[float]:
    strategy = lightning_dct.fabric.DCTStrategy(**COMPRESSED)
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=2)
    fabric.launch()
    model = perceptron()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.005, betas=(beta1, 0.99)))
    for step, (inputs, outputs) in enumerate(Noise(6, 40, 8, rank=rank())):
        if by_hand:
            # Fabric's backward is done before it comes to the optimizer, so it is one synchronisation ahead.
            optimizer.param_groups[0]["lr"] = 0.005 * min(1.0, (step + 2) * SHARE / 4)
        optimizer.zero_grad()
        fabric.backward((model(inputs) - outputs).square().mean())
        optimizer.step()
    assert optimizer.param_groups[0]["betas"][0] == beta1
    return [float(parameter.double().sum()) for parameter in model.parameters()]


def test_fabric(ranks: Any) -> None:
    """Oracle: Adam with beta1 = 0 and a rate that grows."""
    assert ranks(2).run(train_with_fabric, 0.5) == ranks(2).run(train_with_fabric, 0.0, True)


def test_setting_is_checked() -> None:
    with pytest.raises(ValueError, match=r"`momentum` must be one of 'auto', 'keep', 'correct'; got 'yes'"):
        DCTStrategy(momentum="yes")  # type: ignore[arg-type]
