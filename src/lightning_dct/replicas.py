"""Joins the states of ranks that hold shards to states of whole replicas, to be cut anew for other ranks.

A state with ``shards`` holds pieces of these shapes: consecutive ranks of a replica have consecutive rows of every
parameter and of its residual.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

State = Mapping[str, Any]


def put_together(states: Sequence[State], shards: int) -> list[dict[str, Any]]:
    """The states of whole replicas of ``shards`` ranks each, whose states are in the order of the ranks."""
    return [_whole(states[first : first + shards]) for first in range(0, len(states), shards)]


def _whole(pieces: Sequence[State]) -> dict[str, Any]:
    whole = {key: value for key, value in pieces[0].items() if key != "shards"}
    for part in ("weights", "residuals", "accumulated"):
        names = dict.fromkeys(name for piece in pieces for name in piece.get(part, {}))
        if part in whole:
            whole[part] = {name: _joined(pieces, part, name) for name in names}
    whole["owned"] = {}
    before: dict[str, int] = {}
    for piece in pieces:
        for name, parts in piece["owned"].items():
            moved = {before.get(name, 0) + start: tensor for start, tensor in parts.items()}
            whole["owned"].setdefault(name, {}).update(moved)
        for name, shape in piece["shards"].items():
            before[name] = before.get(name, 0) + math.prod(shape)
    return whole


def _joined(pieces: Sequence[State], part: str, name: str) -> Tensor:
    """One tensor of the ranks' shards, with zeros for a rank without one; a buffer is whole on every rank."""
    there = next(piece[part][name] for piece in pieces if name in piece[part])
    if name not in pieces[0]["shards"]:
        return there
    flat = [
        piece[part][name].reshape(-1) if name in piece[part] else there.new_zeros(math.prod(piece["shards"][name]))
        for piece in pieces
    ]
    is_flat = part == "residuals"
    return torch.cat(flat) if is_flat else torch.cat(flat).view(-1, *there.shape[1:])
