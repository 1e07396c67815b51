from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_dct.synchronizing import parameter_names, resolve_process_group


def test_names_are_the_same_with_and_without_compile() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    expected = {parameter: name for name, parameter in plain.named_parameters()}
    assert parameter_names(plain) == expected
    assert parameter_names(torch.compile(plain)) == expected
    assert parameter_names(nn.Sequential(torch.compile(plain[0]), plain[1])) == expected


def test_a_function_is_replaced_by_the_group_it_makes() -> None:
    made: list[object] = []

    def make_group() -> Any:
        made.append(object())
        return made[-1]

    settings: dict[str, Any] = {"process_group": make_group}
    assert resolve_process_group(settings) is made[0] is settings["process_group"]
    assert len(made) == 1


def test_groups_and_their_absence_are_left_alone() -> None:
    group = dist.ProcessGroup(0, 1)
    settings: dict[str, Any] = {"process_group": group}
    assert resolve_process_group(settings) is group
    assert settings == {"process_group": group}
    assert resolve_process_group({}) is None
