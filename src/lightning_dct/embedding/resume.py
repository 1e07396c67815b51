"""What a rank remembers of sharded tables, as a checkpoint holds it, and how another number of ranks takes it over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_dct.embedding.memory_check import check_memory
from lightning_dct.embedding.placement import Placement

if TYPE_CHECKING:
    from lightning_dct.embedding.sharded import ShardedEmbeddingBags


def memory_of(module: ShardedEmbeddingBags) -> dict[str, Any]:
    """Copies, residuals, thresholds, and gradients that wait for a backward: plain numbers, dicts and CPU tensors."""
    return {
        "placement": _fields(module.placement),
        "splits": [{**split.state_dict()} for split in module.splits] if module.exchange == "values" else [],
        "held": {peer: rows.state_dict() for peer, rows in module.held.items()},
        "mirrors": {peer: rows.state_dict() for peer, rows in module.mirrors.items()},
        "collected": [(places.cpu(), gradient.cpu()) for places, gradient in module.collected.parts],
    }


def restore_memory(module: ShardedEmbeddingBags, states: Sequence[Mapping[str, Any]]) -> None:
    """Continue from what was remembered.

    With another number of ranks copies start anew from the rows' initial values. The residuals of all ranks join the
    next gradient, scaled so that the model gets what it would have got.

    Args:
        module: The tables.
        states: One state (this rank's), or those of all ranks of the saved world.

    Raises:
        CheckpointError: They are about other tables, or damaged.
    """
    for state in states:
        check_memory(state, module.table_rows, module.embedding_dim)
    if len(states) == 1 and states[0]["placement"] == _fields(module.placement):
        for saved, rows in (("held", module.held), ("mirrors", module.mirrors)):
            for peer, state in states[0][saved].items():
                rows[peer].load_state_dict(state)
        for split, state in zip(module.splits, states[0]["splits"], strict=False):
            split.load_state_dict(state)
        device = module.weight.device
        saved_parts = states[0]["collected"]
        module.collected.parts = [(places.to(device), gradient.to(device)) for places, gradient in saved_parts]
        return
    module.forget()
    for old_rank, state in enumerate(states):
        old = Placement(**state["placement"])
        pieces = [(old_rank, places.numpy(), gradient) for places, gradient in state["collected"]]
        for owner, rows in state["held"].items():
            cached, slots = rows["cache"]["rows"].numpy(), rows["cache"]["slots"].numpy()
            pieces.append((owner, cached, rows["residual"][slots]))
        for owner, places, gradient in pieces:
            owners, now = module.placement.locate(*old.rows_of(owner, places))
            mine = torch.from_numpy(np.flatnonzero(owners == module.exchange_group.rank))
            scale = module.placement.world_size / old.world_size
            kept = gradient[mine].to(module.weight.device, module.remembered_dtype) * scale
            module.collected.add(torch.from_numpy(now)[mine].to(module.weight.device), kept)


def _fields(placement: Placement) -> dict[str, Any]:
    return {name: getattr(placement, name) for name in ("world_size", "table_rows", "block_rows", "first_rank")}
