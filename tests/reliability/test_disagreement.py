"""Ranks that differ in what tables, split points or stages are stop together, with both values in the message."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distributed.training import Module, fit, rank, trainer_for
from embedding.hybrid import Hybrid
from embedding.hybrid import batches as hybrid_batches
from lightning_dct import DCTPipelineStrategy, DCTStrategy, ShardedEmbeddingBags, SplitPoint
from pipeline.split_models import SplitModule
from pipeline.split_models import batches as stage_batches


def message_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return "no error"


def tables(**settings: Any) -> str:
    return message_of(lambda: trainer_for(DCTStrategy(density=0.5)).fit(Hybrid(settings), hybrid_batches(2)))


def rows_in_another_format() -> str:
    return tables(value_format="int8" if rank() else "int4")


def rows_of_another_density() -> str:
    return tables(density=0.1 + 0.1 * rank())


def a_smaller_cache() -> str:
    return tables(cache_rows=100 - rank())


def tables_on_one_rank_only() -> str:
    class Extra(Hybrid):
        def __init__(self) -> None:
            super().__init__({})
            if rank() == 1:
                self.more = ShardedEmbeddingBags([3], 2)

    return message_of(lambda: trainer_for(DCTStrategy()).fit(Extra(), hybrid_batches(2)))


def another_split_point() -> str:
    module = Module()
    module.model.split = SplitPoint(density=0.1, forward_format="int8" if rank() else "int4")
    return message_of(lambda: fit(DCTStrategy(), module, 3))


def stages_of_another_width() -> str:
    module = SplitModule(2)
    if rank() == 1:
        module.network[0] = nn.Linear(40, 24, dtype=torch.float64)
    return message_of(lambda: trainer_for(DCTPipelineStrategy(stages=2)).fit(module, stage_batches(2, 2)))


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (rows_in_another_format, "`tables.value_format` (rank 0: 'int4', rank 1: 'int8')"),
        (rows_of_another_density, "`tables.density` (rank 0: 0.1, rank 1: 0.2)"),
        (a_smaller_cache, "`tables.cache_rows` (rank 0: 100, rank 1: 99)"),
        (tables_on_one_rank_only, "`more."),
        (another_split_point, "`model.split.forward_format` (rank 0: 'int4', rank 1: 'int8')"),
        (stages_of_another_width, "`parameter network.0.weight` (rank 0: '[24, 40] float32 trained'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_differs_is_named_on_both_ranks(ranks: Any, function: Callable[[], str], says: str) -> None:
    """Oracle: by hand; the harness fails a rank that waits for the other."""
    for message in ranks(2).run(function):
        assert "The ranks disagree on" in message
        assert says in message
