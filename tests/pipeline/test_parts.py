"""The parts of a pipeline by themselves, without ranks."""

from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_dct import SplitPoint
from lightning_dct.kernels.bits import as_bytes
from lightning_dct.pipeline.borders import Border, as_floats, trace_borders
from lightning_dct.pipeline.placement import Placement, convert, cut
from lightning_dct.pipeline.runner import Delivered, set_aside
from lightning_dct.pipeline.sequential import NetworkCall
from lightning_dct.pipeline.steps import LogCall, combine, join, split_batch, split_ragged

CPU = torch.device("cpu")


def test_released_pieces_keep_names_shapes_and_shared_tensors() -> None:
    """Oracle: the parameters before: as many, of the same names and shapes, shared where they
    were.
    """
    layers = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), SplitPoint(), nn.Linear(4, 4)
    )
    layers[2].weight = layers[0].weight
    before = {name: parameter.shape for name, parameter in layers.named_parameters()}
    first, last = cut(layers)
    convert([first], lambda tensor: tensor.to("meta"))
    assert {name: parameter.shape for name, parameter in layers.named_parameters()} == before
    assert [p.is_meta for p in layers.parameters()] == [True] * 5 + [False] * 2
    assert layers[2].weight is layers[0].weight
    assert layers[1].running_mean.is_meta
    convert([first], lambda tensor: torch.empty_like(tensor, device="cpu"))
    assert not any(tensor.is_meta for tensor in [*layers.parameters(), *layers.buffers()])
    assert layers[2].weight is layers[0].weight
    assert (tuple(first.modules._modules), tuple(last.modules._modules)) == (
        ("0", "1", "2"),
        ("4",),
    )


def test_nothing_of_another_stage_is_taken_from_a_checkpoint() -> None:
    """Neither what it has not sent nor a gradient that waits, of another number of stages."""
    module = nn.ModuleDict(
        {"network": nn.Sequential(nn.Linear(4, 4), SplitPoint(), nn.Linear(4, 4))}
    )
    placement = Placement(module, SimpleNamespace(stages=2, stage=1), False)
    saved = {
        part: {f"network.{i}.bias": torch.ones(4) for i in (0, 2)}
        for part in ("residuals", "accumulated")
    }
    placement.drop_foreign(saved)
    assert {part: list(values) for part, values in saved.items()} == {
        key: ["network.2.bias"] for key in saved
    }


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_borders_are_found_without_running_anything(where: str) -> None:
    """Oracle: the shapes of the real forward; no state, no random number is touched, wherever the
    pieces are.
    """
    layers = nn.Sequential(
        nn.Linear(40, 6), nn.BatchNorm1d(6), nn.Dropout(), SplitPoint(), nn.Linear(6, 3)
    )
    pieces = cut(layers)
    if where == "meta":
        convert(pieces, lambda tensor: tensor.to("meta"))
    random = torch.get_rng_state()
    autocast = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    call = NetworkCall(torch.randn(5, 40), {})
    assert trace_borders(pieces, call, CPU, torch.no_grad) == [
        Border(layers[3], (5, 6), torch.float32)
    ]
    with torch.inference_mode():
        found = trace_borders(
            cut(nn.Sequential(nn.Linear(40, 6), *layers[3:])), call, CPU, autocast
        )
    assert found == [Border(layers[3], (5, 6), torch.bfloat16)]
    if where == "cpu":
        assert int(layers[1].num_batches_tracked) == 0
    torch.set_rng_state(random)


def test_delivered_gradients_arrive_scaled_and_once() -> None:
    """Oracle: the gradients set aside, times what the loss is multiplied by, added to what was
    there.
    """
    layer = nn.Linear(3, 2)
    parameters = list(layer.parameters())
    parameters[0].grad = torch.ones(2, 3)
    with set_aside(parameters) as gradients:
        layer(torch.ones(1, 3)).sum().backward()
    assert torch.equal(parameters[0].grad, torch.ones(2, 3))
    assert parameters[1].grad is None
    (Delivered.apply(torch.tensor(7.0), gradients, *parameters) / 2).backward()
    assert torch.equal(parameters[0].grad, torch.full((2, 3), 1.5))
    assert torch.equal(parameters[1].grad, torch.full((2,), 0.5))


@given(st.lists(st.integers(0, 255), max_size=40), st.integers(0, 3))
def test_bytes_viewed_as_floats_survive_copies(values: list[int], room: int) -> None:
    """Oracle: the bytes, after the copies and the accumulation that torch's stages make; NaN
    patterns included.
    """
    payload = torch.tensor(values, dtype=torch.uint8)
    floats = as_floats(payload, -(-len(values) // 4) + room)
    assert floats.shape == (-(-len(values) // 4) + room,)
    leaf = torch.zeros_like(floats, requires_grad=True)
    torch.autograd.backward([leaf], [floats])
    assert torch.equal(as_bytes(leaf.grad)[: len(values)], payload)
    assert torch.equal(as_bytes(floats.clone().detach())[: len(values)], payload)


def test_batches_are_cut_whatever_their_nesting() -> None:
    """Oracle: rows in order, everything else with every part."""
    batch = {
        "a": torch.arange(6),
        "b": [torch.arange(12).view(6, 2), "text"],
        "c": (torch.tensor(1.0), 3),
    }
    parts = split_batch(batch, 3)
    assert [part["a"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert parts[2]["b"][0].tolist() == [[8, 9], [10, 11]]
    assert all(part["b"][1] == "text" and part["c"] == (torch.tensor(1.0), 3) for part in parts)
    with pytest.raises(
        ValueError, match=r"`micro_batches=4` does not divide the training batch, which has 6 rows"
    ):
        split_batch(batch, 4)
    with pytest.raises(ValueError, match="tensors of 4 and 8 rows, and every tensor of it is cut"):
        split_batch({"inputs": torch.ones(8, 4), "weight_of_each_feature": torch.ones(4)}, 4)


def test_borders_do_not_follow_the_default_dtype() -> None:
    """Lightning changes it in the steps of ``precision="bf16-true"``."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        words, _ = Border(SplitPoint(), (4, 8), torch.bfloat16).empty("cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    assert words.dtype == torch.float32


def test_batches_without_tensors_are_refused() -> None:
    """Every micro-batch would be the whole batch."""
    for batch in (UserDict(x=torch.ones(4)), ["text"], torch.tensor(1.0)):
        with pytest.raises(
            ValueError, match=f"No tensors to cut into micro-batches .* a {type(batch).__name__}"
        ):
            split_batch(batch, 2)


def test_a_module_in_several_places_runs_in_each() -> None:
    """Oracle: the Sequential itself."""
    shared = nn.ReLU()
    network = nn.Sequential(
        nn.Linear(4, 4), shared, nn.Linear(4, 4), shared, SplitPoint(), nn.Linear(4, 4), shared
    )
    pieces = cut(network)
    assert [tuple(piece.modules._modules) for piece in pieces] == [("0", "1", "2", "3"), ("5", "6")]
    inputs = torch.randn(3, 4)
    without_split = nn.Sequential(
        *(child for child in network if not isinstance(child, SplitPoint))
    )
    assert torch.equal(pieces[1].modules(pieces[0].modules(inputs)), without_split(inputs))
    split = SplitPoint()
    with pytest.raises(ValueError, match=r"`SplitPoint` '3' of the pipeline stands in two places"):
        cut(nn.Sequential(nn.Linear(4, 4), split, nn.Linear(4, 4), split, nn.Linear(4, 4)))


def test_results_that_are_no_rows_are_joined() -> None:
    """Oracle: a number is the mean over all rows, weighted by hand; what is no tensor stays."""
    outputs = [
        (torch.ones(2, 3), torch.tensor(1.0), None),
        (torch.ones(1, 3), torch.tensor(4.0), None),
    ]
    rows, number, nothing = join(outputs)
    assert torch.equal(rows, torch.ones(3, 3))
    assert float(number) == 2.0
    assert nothing is None


@given(st.integers(1, 20), st.integers(1, 6))
def test_ragged_parts_join_to_the_whole(length: int, parts: int) -> None:
    """Oracle: the rows themselves."""
    value = (torch.arange(length), torch.arange(30 * length).view(length, 30))
    pieces = split_ragged(value, parts, value)
    assert len(pieces) == min(parts, length)
    assert max(len(piece[0]) for piece in pieces) - min(len(piece[0]) for piece in pieces) <= 1
    assert all(torch.equal(one, other) for one, other in zip(join(pieces), value, strict=True))


def test_what_is_no_batch_goes_whole() -> None:
    """Oracle: one part where tensors differ in length, or something is no tensor."""
    for value in ({"x": torch.ones(4), "y": torch.ones(3)}, (torch.ones(4), 3)):
        assert len(split_ragged(value, 2, value)) == 1
    # The sequence comes first, and in the second case nobody sees it.
    for length in (12, 4):
        assert len(split_ragged(torch.ones(length, 4, 8), 2, torch.ones(4, length, 8))) == 1


@pytest.mark.parametrize(
    ("settings", "expected", "batch_size"),
    [
        ({}, 2.0, None),
        ({"batch_size": 1}, 2.0, 2),
        ({"reduce_fx": "mean"}, 2.0, None),
        ({"reduce_fx": torch.mean}, 2.0, None),
        ({"reduce_fx": "sum"}, 4.0, None),
        ({"reduce_fx": sum}, 4.0, None),
        ({"reduce_fx": max}, 3.0, None),
        ({"reduce_fx": torch.min}, 1.0, None),
    ],
)
def test_logged_values_are_combined(
    settings: dict[str, object], expected: float, batch_size: int | None
) -> None:
    """Oracle: 1 and 3 by hand."""
    calls = [[LogCall("x", torch.tensor(value), None, dict(settings))] for value in (1.0, 3.0)]
    (call,) = combine(calls)
    assert float(call.value) == expected
    assert call.settings.get("batch_size") == batch_size


def test_batch_sizes_weigh() -> None:
    """Oracle: (1 * 1 + 3 * 3) / 4; the batch has 4 rows."""
    calls = [
        [LogCall("x", value, None, {"batch_size": size})] for value, size in ((1.0, 1), (3.0, 3))
    ]
    (call,) = combine(calls)
    assert float(call.value) == 2.5
    assert call.settings["batch_size"] == 4
