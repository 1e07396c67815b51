import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_dct
from lightning_dct import agreement
from lightning_dct.agreement import check_agreement, describe_model


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def test_description_is_of_small_plain_values() -> None:
    description = describe_model(model())
    assert description["number of parameters"] == 3 * 4 + 4 + 4 * 2 + 2
    assert description["version of lightning_dct"] == lightning_dct.__version__
    assert description["version of torch"] == torch.__version__
    assert all(type(value) in (int, str) or isinstance(value, str) for value in description.values())


def test_equal_models_with_other_weights_agree() -> None:
    one = model()
    other = copy.deepcopy(one)
    nn.init.zeros_(other[0].weight)
    assert describe_model(one) == describe_model(other) == describe_model(model())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.append(nn.Linear(2, 2)),
        lambda m: m.insert(1, nn.Linear(4, 4)),
        lambda m: setattr(m, "0", nn.Linear(4, 3)),
        lambda m: setattr(m, "1", nn.Linear(4, 2, bias=False)),
        lambda m: m[0].to(torch.bfloat16),
        lambda m: m[0].requires_grad_(False),
        lambda m: m[1].register_parameter("renamed", m[1]._parameters.pop("bias")),
    ],
    ids=["more layers", "another layer between", "transposed", "no bias", "dtype", "frozen", "renamed"],
)
def test_other_models_disagree(change: Callable[[nn.Module], Any]) -> None:
    other = model()
    change(other)
    assert describe_model(other) != describe_model(model())


def ranks_say(monkeypatch: pytest.MonkeyPatch, *everyone: dict[str, Any]) -> None:
    def all_gather_object(said: list[Any], mine: dict[str, Any], group: Any) -> None:
        assert group is None
        said[:] = everyone

    monkeypatch.setattr(agreement.dist, "get_world_size", lambda group: len(everyone))
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)


def test_ranks_that_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_say(monkeypatch, *[{"density": 0.1, "guard": True}] * 3)
    check_agreement({"density": 0.1, "guard": True}, None)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_rank_hears_which_setting_differs(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    everyone = [{"guard": True, "density": 0.1}, {"guard": True, "density": 0.2}, {"guard": True, "density": 0.1}]
    ranks_say(monkeypatch, *everyone)
    with pytest.raises(ValueError, match=r"disagree on `density` \(rank 0: 0.1, rank 1: 0.2, rank 2: 0.1\)"):
        check_agreement(everyone[rank], None)


def test_a_setting_another_rank_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_say(monkeypatch, {"density": 0.1, "new": 1}, {"density": 0.1})
    with pytest.raises(ValueError, match=r"disagree on `new` \(rank 0: 1, rank 1: None\)"):
        check_agreement({"density": 0.1, "new": 1}, None)
