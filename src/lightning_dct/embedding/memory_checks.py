"""Checks copies, residuals and thresholds of sharded tables that a checkpoint has, before any of them is restored."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dct.checksums import CheckpointError
from lightning_dct.embedding.cache import CACHE_ARRAYS
from lightning_dct.embedding.owners import RowOwners

# Groups of rows are exponents of counts, which are int64.
MOST_GROUPS = 63


def check_memory(
    state: Mapping[str, Any], table_rows: Sequence[int], dim: int, kind: type[RowOwners] = RowOwners
) -> None:
    """Check sizes, ranges and dtypes in the state of one rank: ``TableState.compression_state``.

    Raises:
        CheckpointError: The tables have other sizes than ``table_rows`` and ``dim``, or the state is corrupt.
    """
    try:
        saved = kind(**state["placement"])
        if list(saved.table_rows) != list(table_rows):
            raise ValueError(
                f"it is about tables of {list(saved.table_rows)} rows, and the model has tables of {list(table_rows)}"
            )
        _check_parts(state, saved, dim)
        return
    except ValueError as error:
        fault = str(error)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        fault = f"{type(error).__name__}: {error}"
    raise CheckpointError(
        f"The checkpoint's memory of sharded tables does not fit or is corrupt: {fault}. Resume with the model that was"
        " saved, or from another checkpoint."
    )


def _check_parts(state: Mapping[str, Any], saved: RowOwners, dim: int) -> None:
    tables = len(saved.table_rows)
    if not (
        saved.world_size >= 1
        and len(saved.block_rows) == len(saved.first_rank) == tables
        and min(saved.block_rows) >= 1
        and all(0 <= first < saved.world_size for first in saved.first_rank)
    ):
        raise ValueError("the placement of its rows")
    for part, with_residual in (("held", True), ("mirrors", False)):
        for peer, rows in state[part].items():
            if not 0 <= peer < saved.world_size:
                raise ValueError(f"rank {peer} of {saved.world_size} in {part!r}")
            # Held rows are the peer's. Mirrored rows are this rank's, and the state does not say which rank it is.
            universe = saved.owned_rows[peer] if with_residual else max(saved.owned_rows)
            for name, is_sound in _soundness(rows, universe, dim, tables, with_residual).items():
                if not is_sound:
                    raise ValueError(f"{name} of rank {peer} in {part!r}")
    for places, gradient in state["collected"]:
        if not _is_places(places, max(saved.owned_rows)) or gradient.shape != (places.numel(), dim):
            raise ValueError("the collected gradients")


def _soundness(rows: Mapping[str, Any], universe: int, dim: int, tables: int, with_residual: bool) -> dict[str, bool]:
    """Whether each part of the state of :class:`~lightning_dct.embedding.cache.RememberedRows` is sound."""
    cache, code, thresholds = rows["cache"], rows["code"], rows["thresholds"]
    if not all(isinstance(cache[name], Tensor) and cache[name].dtype == torch.int64 for name in CACHE_ARRAYS):
        return {"the cache": False}
    row_at = cache["row_at"]
    cached = row_at[row_at >= 0]
    widths = {"copies": dim, "residual": dim if with_residual else 0}
    return {
        "the cache": _is_places(cached, universe)
        and cached.unique().numel() == cached.numel()
        and row_at.shape == cache["last_used"].shape == cache["counts"].shape
        and int(cache["requests"]) >= 0,
        "the groups of rows": _is_places(code["rows"], universe)
        and bool((code["rows"].diff() > 0).all())
        and _is_places(code["groups"], MOST_GROUPS)
        and code["groups"].shape == code["rows"].shape,
        "the thresholds": thresholds.shape == (tables,)
        and thresholds.dtype.is_floating_point
        and bool(((thresholds >= 0) & thresholds.isfinite()).all()),
        "the copies or residuals": all(
            rows[name].shape == (row_at.numel(), width) and rows[name].is_floating_point()
            for name, width in widths.items()
        )
        and bool(rows["residual"].isfinite().all()),
        "the outdated rows": rows["outdated"].shape == row_at.shape and rows["outdated"].dtype == torch.bool,
    }


def _is_places(places: Tensor, universe: int) -> bool:
    """Whether these are whole numbers from 0 to below ``universe``."""
    if places.dtype != torch.int64 or places.ndim != 1:
        return False
    return places.numel() == 0 or (int(places.min()) >= 0 and int(places.max()) < universe)
