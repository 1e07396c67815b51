"""How the transformers are optimised: AdamW or SGD, a linear warm-up, then a cosine to the run's
last step.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule


def optimizer_with_cosine(module: LightningModule) -> dict[str, Any]:
    """The result of ``configure_optimizers`` for a module about to be trained.

    Its ``hparams`` hold ``learning_rate`` (the peak), ``betas`` of AdamW, ``weight_decay`` (on
    matrices only), ``momentum`` for SGD instead of AdamW, ``warmup_steps`` and
    ``final_learning_rate_fraction`` (the end of the cosine, as a part of the peak).
    """
    settings = module.hparams
    factor = warmup_and_cosine(
        module.trainer.estimated_stepping_batches,
        settings.warmup_steps,
        settings.final_learning_rate_fraction,
    )
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    momentum = settings.get("momentum")
    optimizer: torch.optim.Optimizer
    if momentum is None:
        optimizer = torch.optim.AdamW(
            groups, lr=settings.learning_rate, betas=tuple(settings.betas)
        )
    else:
        optimizer = torch.optim.SGD(groups, lr=settings.learning_rate, momentum=momentum)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def warmup_and_cosine(
    total_steps: float, warmup_steps: int, final_fraction: float
) -> Callable[[int], float]:
    """The factor on the learning rate at every step: a linear warm-up, then a cosine down to
    ``final_fraction``.

    Raises:
        ValueError: The run has no end, so that the cosine has no length.
    """
    if math.isinf(total_steps):
        raise ValueError(
            "the cosine schedule needs an end: set trainer.max_steps or trainer.max_epochs"
        )

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return final_fraction + (1 - final_fraction) * cosine

    return factor
