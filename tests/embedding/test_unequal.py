"""Losses that do not depend on the tables, on some ranks and in some steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from differences import assert_same
from embedding.growing import Growing, spread
from embedding.hybrid import Hybrid, fit, whole

CASES = ["not reached", "not pooled", "one of two", "two backwards"]


def unequal(
    kind: type[Hybrid], case: str, with_zeros: bool, settings: dict[str, Any]
) -> dict[str, Tensor]:
    """Train; on the last rank every other loss lacks some rows, or has their sum times zero."""
    growing = kind is Growing
    module = kind({"density": 0.2, **({"max_rows": 500} if growing else {})})

    def look_up(ids: Tensor) -> Any:
        return module.tables.request(spread(ids) if growing else ids)

    def training_step(batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        ids, goals = batch
        first = look_up(ids)
        second = look_up(ids.flip(0))
        is_odd = module.global_rank == module.trainer.world_size - 1 and batch_idx % 2 == 1
        if case == "not pooled" and is_odd and not with_zeros:
            return module.top(torch.ones(3, module.top[0].in_features)).mean()
        pooled = first.pooled()
        other = second.pooled()
        zero = 0.0 * (pooled.sum() + other.sum())
        loss = (module.top((pooled + other).flatten(1)).squeeze(1) - goals).square().mean()
        if is_odd:
            if case in ("not reached", "not pooled"):
                loss = module.top(torch.ones(3, module.top[0].in_features)).mean()
            elif case == "one of two":
                loss = other.square().mean()
            loss = loss + zero if with_zeros else loss
        if case == "two backwards":
            optimizer = module.optimizers()
            module.manual_backward(pooled.square().mean(), retain_graph=True)
            away = pooled.detach() + (0.0 * pooled if with_zeros else 0.0) if is_odd else pooled
            module.manual_backward((away + other).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            return None
        return loss

    module.training_step = training_step
    module.automatic_optimization = case != "two backwards"
    fit(module, 6, strategy={"compress": "updates", "local_steps": 1}, **settings)
    return whole(module)


@pytest.mark.parametrize(
    ("case", "kind", "settings"),
    [
        *((case, Growing, {}) for case in CASES),
        ("one of two", Hybrid, {"accumulate_grad_batches": 2}),
    ],
)
def test_a_loss_without_the_tables(
    ranks: Any, case: str, kind: Any, settings: dict[str, Any]
) -> None:
    """Oracle: the same run in which that rank adds the rows' sum times zero."""
    found, expected = (
        ranks(2).run(unequal, kind, case, zeros, settings) for zeros in (False, True)
    )
    assert_same(found, expected)
