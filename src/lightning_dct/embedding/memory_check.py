"""Refuses what cannot be the memory of sharded tables, before any of it is used: sizes, ranges, kinds of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dct.embedding.cache import CACHE_ARRAYS
from lightning_dct.embedding.placement import Placement
from lightning_dct.state_file import CheckpointError

# Groups of rows are powers of two below a count, which is an int64.
MOST_GROUPS = 63


def check_memory(state: Mapping[str, Any], table_rows: Sequence[int], dim: int) -> None:
    """Check what one rank has saved.

    Args:
        state: As :func:`~lightning_dct.embedding.resume.memory_of` makes it.
        table_rows: Rows of each of the module's tables.
        dim: Entries a row.

    Raises:
        CheckpointError: The tables are others than the module's, or the state is damaged; the message says what it is.
    """
    try:
        saved = Placement(**state["placement"])
        if list(saved.table_rows) != list(table_rows):
            raise ValueError(
                f"it is about tables of {list(saved.table_rows)} rows, and the model has tables of {list(table_rows)}"
            )
        wrong = next(_faults(state, saved, dim), None)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        wrong = f"{type(error).__name__}: {error}"
    except ValueError as error:
        wrong = str(error)
    if wrong is not None:
        raise CheckpointError(
            f"The checkpoint's memory of sharded tables does not fit or is damaged: {wrong}. Resume with the model that"
            " was saved, or from another checkpoint."
        )


def _faults(state: Mapping[str, Any], saved: Placement, dim: int) -> Iterator[str]:
    tables = len(saved.table_rows)
    if not (saved.world_size >= 1 and len(saved.block_rows) == len(saved.first_rank) == tables):
        yield "the placement of its rows"
    if not all(
        block >= 1 and 0 <= first < saved.world_size
        for block, first in zip(saved.block_rows, saved.first_rank, strict=True)
    ):
        yield "the placement of its rows"
    for part, with_residual in (("held", True), ("mirrors", False)):
        for peer, rows in state[part].items():
            if not 0 <= peer < saved.world_size:
                yield f"rank {peer} of {saved.world_size} in {part!r}"
            # Held are the other's rows; mirrored are this rank's own, and which rank that is is not said.
            universe = saved.owned_rows[peer] if with_residual else max(saved.owned_rows)
            for fault in _faults_of_rows(rows, universe, dim, tables, with_residual):
                yield f"{fault} of rank {peer} in {part!r}"
    for places, gradient in state["collected"]:
        if not _is_places(places, max(saved.owned_rows)) or gradient.shape != (places.numel(), dim):
            yield "gradients that wait for a backward"
    if not all(isinstance(split, Mapping) for split in state["splits"]):
        yield "the masks' thresholds"


def _faults_of_rows(
    rows: Mapping[str, Any], universe: int, dim: int, tables: int, with_residual: bool
) -> Iterator[str]:
    cache, code = rows["cache"], rows["code"]
    if not all(isinstance(cache[name], Tensor) and cache[name].dtype == torch.int64 for name in CACHE_ARRAYS):
        yield "the cache"
        return
    slots, row_at = cache["slots"], cache["row_at"]
    used = row_at.numel()
    sound = (
        _is_places(cache["rows"], universe)
        and _is_ascending(cache["rows"])
        and slots.shape == cache["rows"].shape
        and (slots.numel() == 0 or (int(slots.min()) >= 0 and int(slots.max()) < used))
        and torch.equal(row_at[slots], cache["rows"])
        and int((row_at >= 0).sum()) == slots.numel()
        and cache["last_used"].shape == cache["counts"].shape == row_at.shape
        and int(cache["requests"]) >= 0
    )
    if not sound:
        yield "the cache"
    groups = code["groups"]
    if not (
        _is_places(code["rows"], universe)
        and _is_ascending(code["rows"])
        and _is_places(groups, MOST_GROUPS)
        and groups.shape == code["rows"].shape
    ):
        yield "the groups of rows"
    thresholds, residual = rows["thresholds"], rows["residual"]
    if not (
        thresholds.shape == (tables,)
        and thresholds.dtype.is_floating_point
        and bool(((thresholds >= 0) & thresholds.isfinite()).all())
    ):
        yield "the thresholds"
    if rows["copies"].shape != (used, dim) or not rows["copies"].is_floating_point():
        yield "the copies"
    if not (
        residual.shape == (used, dim if with_residual else 0)
        and residual.is_floating_point()
        and bool(residual.isfinite().all())
    ):
        yield "the residuals"


def _is_places(places: Tensor, universe: int) -> bool:
    """Whether these are whole numbers from 0 to below ``universe``."""
    if places.dtype != torch.int64 or places.ndim != 1:
        return False
    return places.numel() == 0 or (int(places.min()) >= 0 and int(places.max()) < universe)


def _is_ascending(places: Tensor) -> bool:
    return bool((places[1:] > places[:-1]).all())
