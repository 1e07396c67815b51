"""Sharded tables on 2 and 3 ranks against whole tables in one process and
`lightning_dct.reference`: every bit.
"""

import pytest

from embedding.training import train_sharded
from lightning_dct.config import VALUE_FORMATS

SETTINGS = [
    {"density": 1.0, "value_format": "fp32", "refresh_every": 1},
    *({"density": 0.1, "value_format": form, "refresh_every": 3} for form in VALUE_FORMATS),
]


@pytest.mark.parametrize(
    ("world_size", "kind", "pooling"), [(2, "one-hot", "sum"), (3, "multi-hot", "mean")]
)
def test_the_same_as_the_reference(ranks, world_size, kind, pooling):
    for by_settings in ranks(world_size).run(train_all, kind, pooling):
        for found in by_settings:
            assert (found["pooled"], found["gradient"], found["rows"]) == (0.0, 0.0, 0.0)
            assert found["moved"] > 0.01


def train_all(kind, pooling):
    return [train_sharded(6, kind, pooling, **settings) for settings in SETTINGS]
