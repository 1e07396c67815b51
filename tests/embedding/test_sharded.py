"""Sharded tables on 2, 3 and 4 ranks against whole tables in one process with the same masks and the same rounding."""

import pytest

from embedding.training import train_sharded
from lightning_dct.config import VALUE_FORMATS

EVERY_STEP = {"refresh_every": 1, "guard": False}


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["one-hot", "multi-hot"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_everything_sent_is_training_whole_tables(ranks, world_size, kind, pooling):
    settings = {"density": 1.0, "value_format": "fp32", "pooling": pooling, **EVERY_STEP}
    for found in ranks(world_size).run(run, 8, kind, settings):
        assert found["pooled"] < 1e-5
        assert found["rows"] < 1e-5
        assert found["moved"] > 0.01


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("value_format", VALUE_FORMATS)
def test_the_same_as_the_reference_with_the_same_masks(ranks, world_size, value_format):
    # One-hot: rows of one bag have equal gradients, and what breaks their ties is the last bit of a sum.
    settings = {"density": 0.1, "value_format": value_format, **EVERY_STEP}
    for found in ranks(world_size).run(run, 8, "one-hot", settings):
        assert found["pooled"] < 1e-5
        assert found["gradient"] < 1e-5
        assert found["rows"] < 1e-5
        assert found["moved"] > 0.01


def run(steps, kind, settings):
    return train_sharded(steps, kind, **settings)
