"""Weights that share their memory with views, arrays and other processes stay one memory, whichever
set is shown.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn, optim

from distributed.training import Module, Watch, fit, message_of, perceptron
from lightning_dct import DCTStrategy, Updates
from lightning_dct.sync.buffers import Buffers
from lightning_dct.sync.shared_weights import SharedWeights
from lightning_dct.sync.views import View, Views


def kept(parameter: nn.Parameter) -> Tensor:
    return parameter.detach()


def part_of_a_flat_buffer(parameter: nn.Parameter) -> Tensor:
    flat = torch.zeros(100)
    parameter.data = flat[10 : 10 + parameter.numel()].view_as(parameter).copy_(parameter.data)
    view = flat.clone()  # nobody keeps the buffer itself, but another part of it
    del view
    return flat[10 : 10 + parameter.numel()].view_as(parameter)


def array(parameter: nn.Parameter) -> Tensor:
    return torch.from_numpy(parameter.detach().numpy())


def of_other_processes(parameter: nn.Parameter) -> Tensor:
    parameter.data.share_memory_()
    storage = parameter.untyped_storage()
    manager, handle, size = storage._share_filename_cpu_()
    theirs = torch.UntypedStorage._new_shared_filename_cpu(manager, handle, size)
    return torch.tensor([]).set_(theirs).view(torch.float32).view_as(parameter)


@pytest.mark.parametrize("share", [kept, part_of_a_flat_buffer, array, of_other_processes])
def test_a_view_sees_whichever_weights_the_model_has(
    share: Callable[[nn.Parameter], Tensor],
) -> None:
    parameter = nn.Parameter(torch.randn(4, 6))
    weights = SharedWeights()
    views = Views(weights, Buffers())
    weights.adopt("w", parameter)
    shared = parameter.detach().clone()
    view = share(parameter)
    place = parameter.data_ptr()
    with torch.no_grad():
        parameter.add_(1.0)
    for _ in range(2):
        with views.shared(View.HOOKS):
            assert torch.equal(parameter, shared)
            assert torch.equal(view, shared)
            assert torch.equal(weights.shared("w"), shared)
            assert torch.equal(weights.own("w"), own := shared + 1.0)
        assert torch.equal(parameter, own)
        assert torch.equal(view, own)
        assert torch.equal(weights.shared("w"), shared)
        assert parameter.data_ptr() == place
    with views.shared(View.HOOKS):
        view.mul_(2.0)  # is taken over, as any write
    torch.testing.assert_close(view, 2.0 * shared + 1.0)
    torch.testing.assert_close(weights.shared("w"), 2.0 * shared)
    views.open(View.END)
    parameter.data = parameter.data.half()
    views.close(View.END)
    assert parameter.data_ptr() == place
    assert parameter.dtype == torch.float32


def test_what_is_kept_of_a_view_of_the_shared_weights_are_the_shared_weights() -> None:
    """As of a `state_dict()` that is saved after the evaluation.

    Nobody else sees the memory of this rank's own.
    """
    parameter = nn.Parameter(torch.randn(4, 6))
    weights = SharedWeights()
    views = Views(weights, Buffers())
    weights.adopt("w", parameter)
    shared = parameter.detach().clone()
    with torch.no_grad():
        parameter.add_(1.0)
    with views.shared(View.HOOKS):
        state = parameter.detach()
    assert torch.equal(state, shared)
    assert torch.equal(parameter, shared + 1.0)


def train_with_views() -> list[bool]:
    """Whether a view, and one that is made in the middle, is that of the model after each step and
    at the end.
    """
    module = Module(perceptron(), optim.Adam, lr=0.01)
    weight = module.model.first.weight
    module.model.second.weight.data.share_memory_()
    views = [weight.detach()]
    place = weight.data_ptr()

    def look(_: Any) -> bool:
        if len(views) == 1:
            views.append(module.model.gain.detach())
        return torch.equal(views[0], weight) and torch.equal(views[1], module.model.gain)

    strategy = DCTStrategy(density=0.2, local_steps=2, warmup_steps=0)
    seen = fit(strategy, module, 9, watch=Watch(look=look)).seen
    still_shared = module.model.second.weight.is_shared()
    return [*seen, torch.equal(views[0], weight), weight.data_ptr() == place, still_shared]


def test_a_fit_leaves_views_as_they_are(ranks: Any) -> None:
    assert ranks(2).run(train_with_views) == [[True] * 12] * 2


def tie(way: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    whole = torch.ones(8, 16)
    if way == "data":
        model[1].weight.data = model[0].weight.data
    elif way == "transposed":
        model[1].weight.data = model[0].weight.data.t()
    elif way == "halves of a matrix":
        model[0].weight.data = whole[:, :8]
        model[1].weight.data = whole[:, 8:]
    else:
        model[1].weight = model[0].weight
    Updates(model, optim.SGD(model.parameters(), lr=0.1)).close()


def test_parameters_that_are_tied_through_their_data_are_named(ranks: Any) -> None:
    for way in ("data", "transposed"):
        for said in ranks(2).run(message_of, tie, way):
            assert said.startswith(
                "The parameters '0.weight' and '1.weight' are two objects over the same memory"
            )
    for way in ("object", "halves of a matrix"):
        ranks(2).run(tie, way)


def exchange_contents(compiles: bool) -> tuple[int, int]:
    """Of how many parameters a fit has shown the shared weights, and of how many by their
    contents.
    """
    shown: list[bool] = []
    is_seen = SharedWeights._is_seen_by_others

    def note(*arguments: Any) -> bool:
        shown.append(is_seen(*arguments))
        return shown[-1]

    model = torch.compile(perceptron(), backend="aot_eager") if compiles else perceptron()
    with patch.object(SharedWeights, "_is_seen_by_others", note):
        fit(DCTStrategy(density=0.2), Module(model, optim.AdamW, lr=0.01), 5)  # type: ignore[arg-type]
    return len(shown), sum(shown)


@pytest.mark.parametrize("compiles", [False, True])
def test_weights_that_nobody_else_sees_are_not_copied(ranks: Any, compiles: bool) -> None:
    for shown, copied in ranks(2).run(exchange_contents, compiles):
        assert shown > 20
        assert not copied
