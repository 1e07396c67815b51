from typing import Any

import pytest
import torch

from lightning_dct.activations import SplitPoint, SplitSettings
from lightning_dct.activations.layout import entries_at


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"density": 0.0}, ValueError, "`density`.*in \\(0, 1\\]"),
        ({"density": 1.5}, ValueError, "`density`"),
        ({"density": "5%"}, TypeError, "`density`"),
        ({"scope": "table"}, ValueError, "`scope` must be one of 'tensor', 'group', 'sample'"),
        ({"group_dim": 1.0}, TypeError, "`group_dim`"),
        ({"groups": 0, "scope": "group"}, ValueError, "`groups`"),
        ({"groups": 4}, ValueError, "Set scope='group'"),
        ({"select_by": "gradient"}, ValueError, "`select_by` must be one of 'magnitude', 'magnitude_times_gradient'"),
        ({"refresh_every": 0}, ValueError, "`refresh_every`"),
        ({"warmup_steps": -1}, ValueError, "`warmup_steps`"),
        ({"warmup_schedule": "cosine"}, ValueError, "`warmup_schedule`"),
        ({"exploration": 1.0}, ValueError, "`exploration`.*in \\[0, 1\\)"),
        ({"exploration": -0.1}, ValueError, "`exploration`"),
        ({"exploration": None}, TypeError, "`exploration`"),
        ({"forward_format": "1bit"}, ValueError, "`forward_format`.*'int4'"),
        ({"backward_format": "fp16"}, ValueError, "`backward_format`"),
        ({"compress_evaluation": 1}, TypeError, "`compress_evaluation`"),
        ({"guard": None}, TypeError, "`guard`"),
        ({"seed": -1}, ValueError, "`seed`"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    for make in (SplitSettings, SplitPoint):
        with pytest.raises(error, match=message):
            make(**settings)


@pytest.mark.parametrize(
    ("settings", "shape", "message"),
    [
        ({"group_dim": 2}, (4, 4), "`group_dim` is 2 and the activations have 2 dimensions"),
        ({"group_dim": -3}, (4, 4), "`group_dim` is -3"),
        ({"groups": 3}, (4, 4), "`groups` is 3 and does not divide dimension 1"),
        ({"group_dim": 0}, (), "0 dimensions"),
    ],
)
def test_shapes_without_such_groups_are_refused(settings: dict[str, Any], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SplitPoint(scope="group", **settings)(torch.ones(shape))


def test_integers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"floating-point activations and was given torch\.int64"):
        SplitPoint(density=0.5)(torch.arange(10))


def test_groups_that_change_are_refused() -> None:
    split = SplitPoint(density=0.5, scope="group")
    split(torch.randn(4, 6))
    with pytest.raises(ValueError, match="have 4 groups and 6 thresholds are remembered"):
        split(torch.randn(8, 4))


@pytest.mark.parametrize(
    ("density", "size", "entries"), [(0.1, 30, 3), (0.05, 20, 1), (0.05, 21, 2), (1.0, 7, 7), (1e-9, 5, 1), (0.5, 0, 0)]
)
def test_entries_at_a_density(density: float, size: int, entries: int) -> None:
    assert entries_at(density, size) == entries
