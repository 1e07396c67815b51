from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_dct import DCTConfig
from lightning_dct.sync.setup import check_settings, parameter_names


def test_names_are_the_same_with_and_without_compile() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    expected = {parameter: name for name, parameter in plain.named_parameters()}
    assert parameter_names(plain) == expected
    assert parameter_names(torch.compile(plain)) == expected
    assert parameter_names(nn.Sequential(torch.compile(plain[0]), plain[1])) == expected


def group_of(settings: dict[str, Any]) -> Any:
    return check_settings(DCTConfig(), nn.Linear(3, 4), settings, {})


def test_a_function_is_replaced_by_the_group_it_makes() -> None:
    made = iter([object()])
    settings: dict[str, Any] = {"process_group": lambda: next(made)}
    assert group_of(settings) is settings["process_group"] is group_of(settings)


def test_groups_and_their_absence_are_left_alone() -> None:
    group = dist.ProcessGroup(0, 1)
    settings: dict[str, Any] = {"process_group": group}
    assert group_of(settings) is group
    assert settings == {"process_group": group}
    assert group_of({}) is None
