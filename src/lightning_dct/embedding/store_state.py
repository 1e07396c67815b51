"""The saved state of a rank's stores: checks it, reads that of earlier versions, and gives what was
not sent.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dct.checksums import CheckpointError
from lightning_dct.embedding.cache import CACHE_ARRAYS, PEER_ARRAY
from lightning_dct.embedding.owners import Int64Array, RowOwners
from lightning_dct.embedding.store import ROW_STATE

# Groups of rows are exponents of counts, which are int64.
MOST_GROUPS = 63
ENDS = ("held", "mirrors")


def check_memory(
    state: Mapping[str, Any], table_rows: Sequence[int], dim: int, kind: type[RowOwners] = RowOwners
) -> RowOwners:
    """Check sizes, ranges and dtypes in the state of one rank (``compression_state`` of tables);
    the saved placement.

    Raises:
        CheckpointError: The tables have other sizes than ``table_rows`` and ``dim``, or the state
            is corrupt.
    """
    try:
        saved = kind(**state["placement"])
        if list(saved.table_rows) != list(table_rows):
            raise ValueError(
                f"it has tables of {list(saved.table_rows)} rows, and the model of"
                f" {list(table_rows)}"
            )
        for part, is_sound in _soundness(state, saved, dim):
            if not is_sound:
                raise ValueError(part)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            "The checkpoint's memory of sharded tables does not fit or is corrupt"
            f" ({type(error).__name__}: {error}). Resume with the model that was saved, or from"
            " another checkpoint."
        ) from error
    return saved


def as_one_store(state: Mapping[str, Any], num_tables: int, dim: int) -> Mapping[str, Any]:
    """The state of a rank; one of an earlier version, with a store for each peer, is converted.

    What is damaged stays as it is: :func:`check_memory` refuses it.
    """
    if not all(isinstance(state.get(end), Mapping) and "cache" not in state[end] for end in ENDS):
        return state
    try:
        return {**state, **{end: _joined(state[end], num_tables, dim) for end in ENDS}}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError):
        return state


def _joined(by_peer: Mapping[int, Any], num_tables: int, dim: int) -> Mapping[str, Any]:
    """One state from those of one store for each peer."""
    if not by_peer:
        none = torch.empty(0, dtype=torch.int64)
        rows = {
            "copies": torch.empty(0, dim),
            "residual": torch.empty(0, dim),
            "outdated": none.bool(),
        }
        arrays = dict.fromkeys([*CACHE_ARRAYS, *PEER_ARRAY], none)
        return {
            "cache": {**arrays, "requests": 0},
            "codes": {},
            "thresholds": torch.zeros(1, num_tables, dtype=torch.float64),
            **rows,
        }
    parts = [by_peer[peer] for peer in sorted(by_peer)]
    cache = {name: torch.cat([part["cache"][name] for part in parts]) for name in CACHE_ARRAYS}
    lengths = [part["cache"]["row_at"].numel() for part in parts]
    peers = torch.repeat_interleave(torch.tensor(sorted(by_peer)), torch.tensor(lengths))
    thresholds = torch.zeros(len(by_peer) + 1, num_tables, dtype=torch.float64)
    for peer, part in by_peer.items():
        thresholds[peer] = part["thresholds"]
    return {
        "cache": {**cache, "peer_at": peers, "requests": parts[0]["cache"]["requests"]},
        "codes": {peer: by_peer[peer]["code"] for peer in by_peer},
        "thresholds": thresholds,
        **{name: torch.cat([part[name] for part in parts]) for name in (*ROW_STATE, "outdated")},
    }


def _soundness(state: Mapping[str, Any], saved: RowOwners, dim: int) -> Iterator[tuple[str, bool]]:
    """Each part of a rank's state, and whether it is valid; later parts assume that earlier ones
    are.
    """
    num_tables = len(saved.table_rows)
    ranks = range(saved.world_size)
    lengths = len(saved.block_rows), len(saved.first_rank)
    is_placement = lengths == (num_tables, num_tables) and min(saved.block_rows) >= 1
    # A number of ranks that is damaged would otherwise be counted up to.
    for end in ENDS:
        yield (
            "the number of ranks",
            saved.world_size == len(state[end]["codes"]) + 1 == len(state[end]["thresholds"]),
        )
    yield (
        "the placement of its rows",
        is_placement and all(first in ranks for first in saved.first_rank),
    )
    largest = max(saved.owned_rows)
    for end in ENDS:
        # Held rows are the peer's. Mirrored rows are this rank's, and the state does not say which
        # rank it is.
        universes = {peer: saved.owned_rows[peer] if end == "held" else largest for peer in ranks}
        for part, is_sound in _soundness_of_store(
            state[end], universes, num_tables, dim, end == "held"
        ):
            yield f"{part} in {end!r}", is_sound
    for places, gradient in state["collected"]:
        yield (
            "the collected gradients",
            _is_places(places, largest) and gradient.shape == (places.numel(), dim),
        )


def _soundness_of_store(
    rows: Mapping[str, Any],
    universes: Mapping[int, int],
    num_tables: int,
    dim: int,
    with_residual: bool,
) -> Iterator[tuple[str, bool]]:
    """What must hold of the state of a store, by part, and whether it does."""
    cache = rows["cache"]
    thresholds = rows["thresholds"]
    row_at = cache["row_at"]
    peer_at = cache["peer_at"]
    slots = row_at.numel()
    names = (*CACHE_ARRAYS, *PEER_ARRAY)
    are_arrays = all(
        cache[name].dtype == torch.int64 and cache[name].shape == (slots,) for name in names
    )
    yield "the cache", are_arrays and int(cache["requests"]) >= 0
    used = row_at >= 0
    yield (
        "the peers of rows",
        bool(torch.isin(peer_at[used], torch.tensor(list(rows["codes"]))).all()),
    )
    for peer, code in rows["codes"].items():
        yield f"rank {peer} of {len(universes)}", peer in universes
        cached = row_at[used & (peer_at == peer)]
        universe = universes[peer]
        is_set = _is_places(cached, universe) and cached.unique().numel() == cached.numel()
        yield f"the cached rows of rank {peer}", is_set
        is_ascending = _is_places(code["rows"], universe) and bool((code["rows"].diff() > 0).all())
        are_groups = (
            _is_places(code["groups"], MOST_GROUPS) and code["groups"].shape == code["rows"].shape
        )
        yield f"the groups of rows of rank {peer}", is_ascending and are_groups
    are_numbers = (
        thresholds.shape == (len(universes), num_tables) and thresholds.dtype.is_floating_point
    )
    yield "the thresholds", are_numbers and bool(((thresholds >= 0) & thresholds.isfinite()).all())
    for name, width in (("copies", dim), ("residual", dim if with_residual else 0)):
        yield f"the {name}", rows[name].shape == (slots, width) and rows[name].is_floating_point()
    yield "the residual", bool(rows["residual"].isfinite().all())
    yield (
        "the outdated rows",
        rows["outdated"].shape == (slots,) and rows["outdated"].dtype == torch.bool,
    )


def _is_places(places: Tensor, universe: int) -> bool:
    """Whether these are whole numbers from 0 to below ``universe``."""
    is_list = places.dtype == torch.int64 and places.ndim == 1
    return is_list and (
        not places.numel() or (int(places.min()) >= 0 and int(places.max()) < universe)
    )


def unsent_gradients(
    states: Sequence[Mapping[str, Any]], placements: Sequence[RowOwners]
) -> Iterator[tuple[Int64Array, Int64Array, Tensor]]:
    """All that the ranks of these states have collected or not sent yet: tables and rows ``[k]``,
    and ``[k, dim]``.
    """
    for rank, (state, placement) in enumerate(zip(states, placements, strict=True)):
        for places, gradient in state["collected"]:
            yield *placement.rows_of(rank, places.numpy()), gradient
        cache = state["held"]["cache"]
        for owner in state["held"]["codes"]:
            own = (cache["row_at"] >= 0) & (cache["peer_at"] == owner)
            yield (
                *placement.rows_of(owner, cache["row_at"][own].numpy()),
                state["held"]["residual"][own],
            )
