"""What ranks do in the tests of pruned rows."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embedding.hybrid import EVERYTHING, OPTIMIZERS, TABLE_ROWS, Batches, Hybrid, fit
from lightning_dct import EmbeddingPruning, ShardedEmbeddingBags
from lightning_dct.embedding.pruning import PIECES

DIM = 8


class Pruned(Hybrid):
    """A small hybrid-parallel model with rows of two entries a piece."""

    dim = DIM


def whole_rows(module: Pruned) -> dict[str, Tensor]:
    """This rank's rows, masks, counts and optimizer states by table and row, and the replicated
    weights by name.
    """
    tables = module.tables
    found = {name: value.detach().clone() for name, value in module.top.named_parameters()}
    places = np.arange(tables.capacity())
    rows = tables.own_rows(places)
    states = {}
    for optimizer in module.trainer.optimizers if module._trainer is not None else ():
        for key, value in optimizer.state.get(tables.weight, {}).items():
            if isinstance(value, Tensor) and value.ndim:
                if tables.kept is not None:
                    shape = (len(places), PIECES, *value.shape[1:])
                    value = tables.kept.expand(value, places, value.new_zeros(shape))
                states[key] = value
    for table, row, place in zip(
        *tables.placement.rows_of(tables.exchange_group.rank, places), places, strict=True
    ):
        name = f"{table}.{row}"
        found[name] = rows[place].clone()
        found |= {f"{name} {key}": value[place].clone() for key, value in states.items()}
        if tables.kept is not None:
            found[f"{name} mask"] = torch.tensor(int(tables.kept.masks[place]))
        if tables.row_requests is not None:
            found[f"{name} requests"] = tables.row_requests[place].clone()
    return found


def train(
    number: int, exchange: dict[str, Any], at_step: int, optimizer: str = "sgd", **settings: Any
) -> Any:
    """Train, prune, and save when told where; this rank's weights, and its share of bytes of all
    owned rows.
    """
    module = Pruned(exchange, optimizer)
    keep = settings.pop("keep", 0.5)
    fit(module, number, callbacks=[EmbeddingPruning(keep, at_step)], **settings)
    return whole_rows(module), tuple(module.tables.weight.shape), module.tables.capacity()


def load(path: str) -> dict[str, Tensor]:
    """Resume from a checkpoint, and give what this rank has at the start."""
    module = Pruned({"density": 0.2}, "adagrad")
    seen = []
    module.on_train_start = lambda: seen.append(whole_rows(module))
    fit(module, 1, path, max_epochs=9)
    return seen[0]


def train_plainly(
    number: int, at_step: int, masks: dict[str, int], optimizer: str
) -> dict[str, Tensor]:
    """The same training in one process with whole rows: what is pruned is set to its initial value
    in every step.
    """
    sharded = ShardedEmbeddingBags(TABLE_ROWS, DIM, seed=5, **EVERYTHING)
    sharded.materialize()
    start = sharded.own_rows(np.arange(sum(TABLE_ROWS)))
    names = [f"{table}.{row}" for table, rows in enumerate(TABLE_ROWS) for row in range(rows)]
    kept = torch.tensor(
        [[masks[name] >> piece & 1 for piece in range(PIECES)] for name in names], dtype=torch.bool
    )
    kept = kept.repeat_interleave(DIM // PIECES, dim=1)
    order = torch.from_numpy(
        sharded.placement.locate(
            np.repeat(np.arange(len(TABLE_ROWS)), TABLE_ROWS),
            np.concatenate([np.arange(rows) for rows in TABLE_ROWS]),
        )[1]
    )
    start = start[order]
    weight = nn.Parameter(start.clone())
    top = Pruned({}).top
    stepper = OPTIMIZERS[optimizer]([weight, *top.parameters()], lr=0.2)
    first = torch.tensor([0, *TABLE_ROWS]).cumsum(0)[:-1]
    for index in range(number):
        ids, targets = Batches.batch(index)
        stepper.zero_grad()
        ((top(weight[ids + first].flatten(1)).squeeze(1) - targets).square().mean()).backward()
        stepper.step()
        if index + 1 >= at_step:
            weight.data = torch.where(kept, weight.data, start)
    found = {name: value.detach() for name, value in top.named_parameters()}
    return found | dict(zip(names, weight.detach(), strict=True))
