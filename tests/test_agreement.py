import copy
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lightning_dct
from lightning_dct import agreement
from lightning_dct.agreement import check_agreement, describe_optimizers, describe_parameters

VERSIONS = {
    "version of lightning_dct": lightning_dct.__version__,
    "version of torch": torch.__version__,
}
Rank = tuple[dict[str, Any], nn.Module]


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def meet(monkeypatch: pytest.MonkeyPatch, ranks: list[Rank]) -> None:
    """Let every gathering return what these ranks would say in it."""

    def gather(mine: Any, group: Any) -> list[Any]:
        if "checksum" not in mine:
            return [describe_parameters(module) for _, module in ranks]
        return [
            {
                "mine": {**VERSIONS, **settings},
                "checksum": zlib.crc32(repr(describe_parameters(module)).encode()),
            }
            for settings, module in ranks
        ]

    monkeypatch.setattr(agreement, "gather_objects", gather)


def test_ranks_that_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [({"density": 0.1, "adapt_threshold": True}, model()) for _ in range(3)]
    meet(monkeypatch, ranks)
    for settings, module in ranks:
        check_agreement(settings, module, None)


def test_a_setting_that_is_no_number_equals_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the best loss of a schedule that has not seen any."""
    groups = [[{"params": model().parameters(), "best": float("nan")}] for _ in range(2)]
    meet(
        monkeypatch,
        [(describe_optimizers([torch.optim.SGD(one, lr=0.1)], {}), model()) for one in groups],
    )
    check_agreement({}, model(), None)


def test_other_weights_do_not_matter() -> None:
    one = model()
    other = copy.deepcopy(one)
    nn.init.zeros_(other[0].weight)
    assert describe_parameters(one) == describe_parameters(other)


def test_without_a_process_group_there_is_nobody_to_disagree_with() -> None:
    check_agreement({"density": 0.1}, model(), None)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_rank_hears_which_setting_differs(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    ranks = [
        ({"adapt_threshold": True, "density": density}, model()) for density in (0.1, 0.2, 0.1)
    ]
    meet(monkeypatch, ranks)
    with pytest.raises(
        ValueError, match=r"disagree on `density` \(rank 0: 0.1, rank 1: 0.2, rank 2: 0.1\)"
    ):
        check_agreement(*ranks[rank], None)


def test_a_setting_another_rank_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    meet(monkeypatch, [({"density": 0.1, "new": 1}, model()), ({"density": 0.1}, model())])
    with pytest.raises(ValueError, match=r"disagree on `new` \(rank 0: 1, rank 1: None\)"):
        check_agreement({"density": 0.1, "new": 1}, model(), None)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda m: m.append(nn.Linear(2, 5)),
            r"`parameter 2.weight` \(rank 0: 'missing', rank 1: '\[5, 2\] float32 tr",
        ),
        (
            lambda m: setattr(m, "0", nn.Linear(4, 3)),
            r"`parameter 0.weight` \(rank 0: '\[4, 3\] .*rank 1: '\[3, 4\] ",
        ),
        (
            lambda m: setattr(m, "1", nn.Linear(4, 2, bias=False)),
            r"`parameter 1.bias` .*rank 1: 'missing'",
        ),
        (
            lambda m: m[0].to(torch.bfloat16),
            r"`parameter 0.weight` .*float32 trained.*bfloat16 trained",
        ),
        (lambda m: m[1].requires_grad_(False), r"`parameter 1.weight` .*trained.*frozen"),
        (lambda m: m.insert(0, m.pop(1)) and None, r"`parameter 0.weight`"),
    ],
    ids=["more layers", "transposed", "no bias", "dtype", "frozen", "order"],
)
def test_every_rank_hears_which_parameter_differs(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.Sequential], Any], said: str, rank: int
) -> None:
    other = model()
    change(other)
    ranks: list[Rank] = [({}, model()), ({}, other)]
    meet(monkeypatch, ranks)
    with pytest.raises(ValueError, match=said):
        check_agreement(*ranks[rank], None)


def test_a_lazy_layer_is_named() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"'1\.weight' of a lazy layer .* `configure_model`"):
        check_agreement({}, module, None)
