import ast
import copy
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_dct.activations
from lightning_dct.activations.codec import decode_backward, decode_forward, encode_backward
from lightning_dct.activations.split_point import ROW_FORMATS, SplitPoint
from strategies_for_hypothesis import examples

LOSSLESS: dict[str, Any] = {"forward_format": "fp32", "backward_format": "fp32"}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def largest_by_sorting(entries: list[float], k: int) -> set[int]:
    return set(sorted(range(len(entries)), key=lambda i: -abs(entries[i]))[:k])


# The mask


def test_the_largest_are_kept() -> None:
    activations = normal(12, 10)
    received = SplitPoint(density=0.1, **LOSSLESS)(activations)
    kept = largest_by_sorting(activations.view(-1).tolist(), 12)
    assert set(received.view(-1).nonzero().squeeze(1).tolist()) == kept
    assert torch.equal(received[received != 0], activations[received != 0])


@given(
    shape=st.sampled_from([(), (0, 5), (1,), (7,), (4, 6), (3, 4, 5), (2, 0)]),
    density=st.sampled_from([0.05, 0.3, 0.6, 1.0]),
    formats=st.tuples(st.sampled_from(ROW_FORMATS), st.sampled_from(ROW_FORMATS)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    training=st.booleans(),
    seed=st.integers(0, 9),
)
@examples(120)
def test_one_process_sees_what_the_wire_gives(
    shape: tuple[int, ...],
    density: float,
    formats: tuple[Any, Any],
    dtype: torch.dtype,
    training: bool,
    seed: int,
) -> None:
    split = SplitPoint(
        density, forward_format=formats[0], backward_format=formats[1], seed=seed
    ).train(training)
    wired = copy.deepcopy(split)
    for step in range(3):
        split.advance(step)
        wired.advance(step)
        activations = normal(*shape, seed=10 * seed + step).to(dtype).requires_grad_()
        gradient = normal(*shape, seed=100 + step).to(dtype)
        received = split(activations)
        assert (received.dtype, received.shape) == (dtype, activations.shape)
        received.backward(gradient)

        layout = wired.layout(activations.shape)
        payload, kept = wired.encode(layout, activations)
        arrived, positions = decode_forward(layout, payload, dtype)
        assert torch.equal(arrived, received)
        payload = encode_backward(layout, gradient, positions, wired.rounding_seed)
        returned = decode_backward(layout, payload, kept, dtype)
        assert activations.grad is not None
        assert torch.equal(returned, activations.grad)
        # One mask for both directions.
        if positions is not None:
            outside = torch.ones(layout.numel, dtype=torch.bool)
            outside[positions] = False
            for tensor in (received, activations.grad):
                assert not bool(tensor.detach().reshape(-1)[outside].any())
    assert split.get_extra_state() == wired.get_extra_state()


def test_inputs_that_are_not_contiguous() -> None:
    activations = normal(6, 8)
    ours = SplitPoint(density=0.3)(activations.t())
    assert torch.equal(ours, SplitPoint(density=0.3)(activations.t().contiguous()))


def test_under_autocast() -> None:
    model = nn.Sequential(nn.Linear(8, 8), SplitPoint(density=0.3), nn.Linear(8, 1))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(normal(4, 8))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("shape", [(4, 7), (1, 1), (5,)])
def test_a_gradient_that_is_one_number_for_all(shape: tuple[int, ...]) -> None:
    """`sum` gives such a tensor, whose strides are zero."""
    activations = normal(*shape).requires_grad_()
    SplitPoint(density=1.0, **LOSSLESS)(activations).sum().backward()
    assert torch.equal(activations.grad, torch.ones(shape))  # type: ignore[arg-type]


def test_bytes_that_would_travel_are_counted_where_gradients_come_back() -> None:
    """Oracle: what a pipeline counts for the same layout: positions and values forward, whole words
    of values back.
    """
    split = SplitPoint(density=0.2, forward_format="int8", backward_format="int4")
    layout = split.layout((6, 8))
    model = nn.Sequential(nn.Linear(8, 8), split)
    checkpoint(model, normal(6, 8), use_reentrant=False).sum().backward()
    with torch.no_grad():
        model(normal(6, 8))
    model.eval()(normal(6, 8)).sum().backward()
    totals = split.traffic.totals
    assert totals.bytes_sent == layout.forward_bytes + -(-layout.backward_bytes // 4) * 4
    assert (totals.bytes_dense, totals.entries_sent, totals.entries) == (2 * 4 * 48, 2 * 10, 2 * 48)


# Payloads of one size


def test_overflow_keeps_the_largest_and_is_counted() -> None:
    split = SplitPoint(density=0.1, **LOSSLESS)
    split(normal(20, 20))
    assert split.overflows == 0
    louder = normal(20, 20, seed=1) * 5
    received = split(louder)
    assert set(received.view(-1).nonzero().squeeze(1).tolist()) == largest_by_sorting(
        louder.view(-1).tolist(), 40
    )
    assert split.overflows == 1
    assert split.thresholds_in_use()[0] > 2 * split.threshold


def test_payloads_have_one_size_whatever_they_hold() -> None:
    split = SplitPoint(density=0.1)
    layout = split.layout((30, 30))
    for scale in (1.0, 0.0, 0.5, 1.0, 3.0):
        payload, positions = split.encode(layout, normal(30, 30) * scale)
        assert payload.numel() == layout.forward_bytes
        assert positions is not None
        assert positions.numel() <= layout.capacity == 90


# From step to step


def test_refresh_selects_anew_on_its_steps() -> None:
    split = SplitPoint(density=0.1, refresh_every=5)
    exact = []
    for step in range(12):
        split.advance(step)
        activations = normal(20, 20, seed=step)
        split(activations)
        if split.threshold == activations.abs().flatten().kthvalue(400 - 40 + 1).values.item():
            exact.append(step)
    assert exact == [0, 5, 10]
    assert split.traffic.totals.refreshes == 3
    old = split.threshold
    split.refresh_requested = True
    split(normal(20, 20, seed=99) * 2)
    assert split.threshold > 1.5 * old


@pytest.mark.parametrize("drift", [0.995, 1.005])
def test_guard_holds_the_count_on_drifting_data(drift: float) -> None:
    split = SplitPoint(density=0.1, refresh_every=10**6)
    counts = []
    for step in range(120):
        split.advance(step)
        activations = normal(64, 32, seed=step) * drift**step
        if step >= 80:
            counts.append(int((activations.abs() >= split.threshold).sum()) / 205)
        split(activations)
    assert sum(counts) / len(counts) == pytest.approx(0.97, abs=0.1)


def test_guard_takes_the_selection_when_far_too_many_reach_a_threshold() -> None:
    split = SplitPoint(density=0.1)
    split(normal(20, 20))
    old = split.threshold
    split(normal(20, 20, seed=1) * 50)
    split.advance(1)
    assert split.threshold > 30 * old


def test_thresholds_stay_as_they_are_during_a_step() -> None:
    split = SplitPoint(density=0.1, **LOSSLESS)
    split.advance(0)
    split(normal(20, 20))
    split.advance(1)
    first = split(normal(20, 20, seed=1) * 0.9)
    for seed in (2, 3):
        split(normal(20, 20, seed=seed) * 3)
        # Lightning begins a batch; with accumulated gradients the step is the same.
        split.advance(1)
    assert torch.equal(split(normal(20, 20, seed=1) * 0.9), first)
    split(normal(20, 20, seed=4) * 3)
    split.advance(2)
    assert not torch.equal(split(normal(20, 20, seed=1) * 0.9), first)


@pytest.mark.parametrize("settings", [{}, {"forward_format": "int4"}])
def test_activation_checkpointing_sees_the_same_mask(settings: dict[str, Any]) -> None:
    """And moves the thresholds alike: what is repeated is not counted again."""

    def run(recompute: bool) -> tuple[list[Tensor], dict[str, Any], int]:
        torch.manual_seed(0)
        split = SplitPoint(density=0.2, backward_format="int4", **settings)
        model = nn.Sequential(nn.Linear(10, 16), nn.GELU(), split, nn.Linear(16, 16), nn.GELU())
        for step in range(3):
            split.advance(step)
            for micro_batch in range(2):
                activations = normal(12, 10, seed=10 * step + micro_batch)
                out = (
                    checkpoint(model, activations, use_reentrant=False)
                    if recompute
                    else model(activations)
                )
                out.square().sum().backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return grads, split.get_extra_state(), split.overflows

    (ours, *state), (theirs, *expected) = run(True), run(False)
    assert state == expected
    assert expected[1] > 0
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


# Stochastic rounding


@pytest.mark.parametrize("value_format", ["int8", "int4"])
def test_rounding_is_unbiased_both_ways(value_format: Any) -> None:
    split = SplitPoint(density=1.0, forward_format=value_format, backward_format=value_format)
    trials = 500
    forward = torch.zeros(4, 8)
    backward = torch.zeros(4, 8)
    activations = normal(4, 8).requires_grad_()
    gradient = normal(4, 8, seed=1)
    for step in range(trials):
        split.advance(step)
        activations.grad = None
        received = split(activations)
        received.backward(gradient)
        forward += received.detach()
        assert activations.grad is not None
        backward += activations.grad
    for mean, value in ((forward / trials, activations.detach()), (backward / trials, gradient)):
        step_size = (
            value.abs().amax(1, keepdim=True) / (127 if value_format == "int8" else 7) * 1.01
        )
        assert bool(((mean - value).abs() < 5 * 0.5 * step_size / math.sqrt(trials)).all())


def test_micro_batches_and_steps_are_rounded_differently_and_the_global_generator_is_left_alone() -> (
    None
):
    split = SplitPoint(density=1.0, forward_format="int4")
    state = torch.get_rng_state()
    activations = normal(1, 64)
    first = split(activations)
    assert torch.equal(split(activations), first)
    nudged = activations.clone()
    nudged[0, 0] += 1e-6
    assert not torch.equal(split(nudged)[0, 1:], first[0, 1:])
    split.advance(1)
    assert not torch.equal(split(activations), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(
        SplitPoint(density=1.0, forward_format="int4", seed=1)(activations), first
    )


# Evaluation


def test_evaluation_is_deterministic_and_changes_nothing() -> None:
    split = SplitPoint(density=0.2, forward_format="int4")
    for step in range(3):
        split.advance(step)
        split(normal(20, 20, seed=step))
    split.eval()
    state = copy.deepcopy(split.state_dict())
    outs = []
    for step in (3, 4, 3):
        split.completed_steps = step
        outs.append(split(normal(20, 20, seed=7) * 2))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert int((outs[0] != 0).sum()) <= 80
    split.completed_steps = 2
    assert state == split.state_dict()


def test_evaluation_before_training_selects_from_its_own_batch() -> None:
    split = SplitPoint(density=0.2, **LOSSLESS).eval()
    for seed in range(2):
        assert int((split(normal(20, 20, seed=seed)) != 0).sum()) == 80
    assert split.refresh_requested
    assert split.thresholds_in_use() == []


# State


@pytest.mark.parametrize("saved_after", [34, 35])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(saved_after: int) -> None:
    def make() -> SplitPoint:
        return SplitPoint(density=0.2, forward_format="int4", refresh_every=12)

    def steps(split: SplitPoint, start: int, stop: int) -> list[Tensor]:
        outs = []
        for forward in range(start, stop):
            split.advance(forward // 2)
            outs.append(split(normal(12, 5, 8, seed=forward)))
        return outs

    whole = make()
    expected = steps(whole, 0, 60)[saved_after:]
    first = make()
    steps(first, 0, saved_after)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = make()
    second.load_state_dict(torch.load(file, weights_only=True))
    for ours, theirs in zip(steps(second, saved_after, 60), expected, strict=True):
        assert torch.equal(ours, theirs)
    evaluated = make().eval()
    evaluated.load_state_dict(whole.state_dict())
    assert torch.equal(evaluated(normal(12, 5, 8)), whole.eval()(normal(12, 5, 8)))


def test_another_density_selects_anew() -> None:
    first = SplitPoint(density=0.2)
    first.advance(3)
    first(normal(20, 20))
    second = SplitPoint(density=0.05)
    second.load_state_dict(first.state_dict())
    second(normal(20, 20))
    assert second.threshold > first.threshold


def test_another_world_goes_on_with_the_threshold_of_the_first_rank_that_has_one() -> None:
    ranks = [SplitPoint(density=0.2) for _ in range(3)]
    for rank, split in enumerate(ranks[1:]):
        split(normal(20, 20, seed=rank))
    resumed = SplitPoint(density=0.2)
    resumed.load_compression_state([split.compression_state() for split in ranks])
    assert (
        resumed.thresholds_in_use() == ranks[1].thresholds_in_use() != ranks[2].thresholds_in_use()
    )
    assert not resumed.refresh_requested


def test_what_is_shown_and_logged() -> None:
    split = SplitPoint(density=0.2)
    assert "density=0.2, refresh_every=1000, forward_format='bf16'" in repr(split)
    assert split.thresholds_in_use() == []
    split(normal(8, 4))
    assert len(split.thresholds_in_use()) == 1


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"density": 0.0}, ValueError, "`density`.*in \\(0, 1\\]"),
        ({"density": "5%"}, TypeError, "`density`"),
        ({"refresh_every": 0}, ValueError, "`refresh_every`"),
        ({"refresh_every": 2.5}, TypeError, "`refresh_every`"),
        ({"forward_format": "1bit"}, ValueError, "`forward_format`.*'int4'"),
        ({"backward_format": "fp16"}, ValueError, "`backward_format`"),
        ({"seed": -1}, ValueError, "`seed`"),
    ],
)
def test_wrong_settings_are_named(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        SplitPoint(**settings)


@pytest.mark.parametrize(
    ("activations", "given"),
    [(torch.arange(10), r"torch\.int64"), ((torch.ones(3), None), "tuple"), (None, "NoneType")],
)
def test_what_is_no_tensor_of_numbers_is_refused(activations: Any, given: str) -> None:
    """An LSTM returns a tuple."""
    with pytest.raises(
        TypeError, match=f"one tensor of floating-point activations and was given {given}"
    ):
        SplitPoint(density=0.5)(activations)


def test_activations_import_neither_lightning_nor_torch_distributed() -> None:
    for path in Path(lightning_dct.activations.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert not name.startswith(
                    ("lightning.", "pytorch_lightning", "torch.distributed")
                ), (path, name)
