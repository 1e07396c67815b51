"""Training reads no outdated row: rows that are new in a cache, and rows that their owners replace,
come whole.
"""

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embedding.growing import Growing
from embedding.hybrid import TABLE_ROWS, Hybrid, fit
from embedding.pruned import Pruned
from lightning_dct import EmbeddingPruning, GrowingEmbeddingBags, ShardedEmbeddingBags
from lightning_dct.agreement import gather_objects
from lightning_dct.embedding.pruning import prune

DIM = 8
IDS = torch.arange(60).view(-1, 1)
# At most this much of the largest entry is left to later messages: int8 rounds a row by 0.43% of
# its largest change.
ROUNDED = 0.01


def error_of(tables: ShardedEmbeddingBags, ids: Tensor) -> float:
    """How far the rows that training reads are from the exact ones."""
    with torch.no_grad():
        exact = tables(ids)
    return float((tables(ids).detach() - exact).abs().max() / exact.abs().max())


def make(**settings: Any) -> ShardedEmbeddingBags:
    tables = ShardedEmbeddingBags([60], DIM, density=0.05, **settings)
    tables.materialize()
    with torch.no_grad():
        tables.weight.normal_()
    return tables


def errors_of_fixed() -> dict[str, float]:
    """By what has happened to tables: how outdated the rows are that a look-up reads then."""
    found = {}
    tables = make()
    small = make(cache_rows=5)
    found["new"] = error_of(tables, IDS)
    tables.load_state_dict({**tables.state_dict(), "weight": tables.weight.detach() * -3})
    found["loaded"] = error_of(tables, IDS)
    good = {name: copy.deepcopy(value) for name, value in tables.state_dict().items()}
    with torch.no_grad():
        tables.weight.fill_(math.nan)
    assert tables(IDS).isnan().any()
    tables.load_state_dict(good)
    found["loaded after NaN"] = error_of(tables, IDS)
    tables.row_requests = torch.ones(tables.capacity(), dtype=torch.int32)
    prune(tables, 0.5, [])
    found["pruned"] = error_of(tables, IDS)
    for part in (IDS[:20], IDS[20:], IDS[:20]):
        found[f"a small cache reads {int(part[-1])}"] = error_of(small, part)
    return found


def errors_of_growing() -> dict[str, float]:
    """Rows go far from the default row, are learnt of by all ranks, are evicted, and looked up
    again.
    """
    tables = GrowingEmbeddingBags(1, DIM, max_rows=20, density=0.05)
    found = {}
    tables.materialize()
    found["new"] = error_of(tables, IDS[:15])
    with torch.no_grad():
        tables.weight.normal_()
    for _ in range(9):
        tables(IDS[:15])
    found["others"] = error_of(tables, IDS[20:50])
    found["evicted"] = error_of(tables, IDS[:15])
    return found


@pytest.mark.parametrize("errors", [errors_of_fixed, errors_of_growing])
def test_rows_come_whole(ranks: Any, errors: Any) -> None:
    """Oracle: exact rows. A message of changes alone would send a twentieth of the entries."""
    for found in ranks(2).run(errors):
        assert {
            name: error for name, error in found.items() if not error <= 5 * ROUNDED
        } == {}  # NaN is not


def error_in_fp64() -> float:
    """How far the rows that training reads are from the exact ones after a change of dtype in
    mid-run.
    """
    tables = ShardedEmbeddingBags([60], DIM, density=1.0, value_format="fp32")
    tables.materialize()
    for dtype in (torch.float32, torch.float64):
        tables.to(dtype)
        with torch.no_grad():
            tables.weight.normal_()
        for _ in range(3):  # each message brings 24 bits of what the earlier ones have left
            tables(IDS).square().sum().backward()
    return error_of(tables, IDS)


def test_rows_in_fp64_are_read_in_fp64(ranks: Any) -> None:
    """As of `precision="64-true"`, with which Lightning changes the dtype when the rows have been
    made.
    """
    for world_size in (1, 2):
        assert max(ranks(world_size).run(error_in_fp64)) < 1e-14


def untouched() -> tuple[int, int]:
    """The bytes of a look-up of rows that are new and untouched, and of one of rows that are
    known.
    """
    tables = ShardedEmbeddingBags([6000], DIM)
    sent = []
    tables.materialize()
    for _ in range(2):
        before = tables.traffic.totals.bytes_sent
        tables(torch.arange(6000).view(-1, 1))
        sent.append(tables.traffic.totals.bytes_sent - before)
    return sent[0], sent[1]


def test_untouched_rows_cost_nothing(ranks: Any) -> None:
    for first, second in ranks(2).run(untouched):
        assert first <= second + 8


def first_error(kind: str, path: str, save: bool) -> float:
    """Train far and save, or resume; how outdated the first rows are that training reads then."""
    make = {"fixed": Hybrid, "growing": Growing, "pruned": Pruned}[kind]
    exchange = {"density": 0.05, **({"max_rows": 200} if kind == "growing" else {})}
    module = make(exchange, learning_rate=1.0)
    found = []
    prunes = {"callbacks": [EmbeddingPruning(0.5, 10)]} if kind == "pruned" else {}
    forward = module.forward

    def watched(ids: Tensor) -> Tensor:
        if not found and torch.is_grad_enabled():
            found.append(error_of(module.tables, ids))
        return forward(ids)

    if save:
        fit(module, 12, save_to=path, **prunes)
        return 0.0
    module.forward = watched
    fit(module, 12, path, max_epochs=2, **prunes)
    return found[0]


def copies_of_evicted(path: str, max_rows: int, loads: bool) -> list[float]:
    """How far a peer's copies of rows are from the default rows, for rows that it has no more;
    after a look-up.
    """
    module = Growing({"density": 0.02, "max_rows": max_rows}, learning_rate=1.0)
    found = []

    def look() -> None:
        tables = module.tables
        kept = gather_objects(tables.directory.rows.contents()[0])
        held = tables.own_copies
        for owner in held.codes:
            places, slots = held.cache.contents(owner)
            gone = ~np.isin(places, kept[owner])
            ids = [numbers.tolist() for numbers in tables.placement.rows_of(owner, places)]
            rows = [
                [row for table, row in zip(*ids, strict=True) if table == one]
                for one in range(len(TABLE_ROWS))
            ]
            offsets = [0, *itertools.accumulate(map(len, rows))]
            with torch.enable_grad():
                tables(torch.tensor([row for some in rows for row in some]), torch.tensor(offsets))
            off = (held.copies[slots] - tables.initial(owner, places)).abs().amax(dim=1)
            found.extend(off[torch.from_numpy(gone)].tolist())

    if loads:
        module.on_train_start = look
        fit(module, 8, path, max_epochs=2)
    else:
        fit(module, 8, save_to=path)
    return found


def test_copies_of_rows_that_a_smaller_room_evicts_become_default_rows(
    ranks: Any, tmp_path: Path
) -> None:
    path = str(tmp_path / "x.ckpt")
    ranks(2).run(copies_of_evicted, path, 400, False)
    for off in ranks(2).run(copies_of_evicted, path, 30, True):
        assert len(off) > 10
        assert max(off) < ROUNDED * DIM


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fixed", "growing", "pruned"])
def test_another_number_of_ranks_reads_the_rows_it_resumes(
    ranks: Any, tmp_path: Path, kind: str
) -> None:
    path = str(tmp_path / "x.ckpt")
    ranks(3).run(first_error, kind, path, True)
    assert max(ranks(2).run(first_error, kind, path, False)) < ROUNDED
