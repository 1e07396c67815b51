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
from lightning_dct.activations import (
    SplitPoint,
    decode_backward,
    decode_forward,
    encode_backward,
)
from lightning_dct.activations.settings import ROW_FORMATS
from lightning_dct.warmup import warmup_density, warmup_stage
from strategies_for_hypothesis import examples

LOSSLESS: dict[str, Any] = {"forward_format": "fp32", "backward_format": "fp32"}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def largest_by_sorting(entries: list[float], k: int) -> set[int]:
    return set(sorted(range(len(entries)), key=lambda i: -abs(entries[i]))[:k])


# The mask


def test_tensor_scope_keeps_the_largest() -> None:
    activations = normal(12, 10)
    received = SplitPoint(density=0.1, **LOSSLESS)(activations)
    kept = largest_by_sorting(activations.view(-1).tolist(), 12)
    assert set(received.view(-1).nonzero().squeeze(1).tolist()) == kept
    assert torch.equal(received[received != 0], activations[received != 0])


@pytest.mark.parametrize(("group_dim", "groups"), [(1, None), (1, 3), (-1, 2), (0, 4), (2, 8)])
def test_group_scope_keeps_the_largest_of_each(group_dim: int, groups: int | None) -> None:
    activations = normal(8, 6, 8)
    activations[:, 2] *= 100
    split = SplitPoint(density=0.25, scope="group", group_dim=group_dim, groups=groups, **LOSSLESS)
    mask = split(activations) != 0
    length = activations.shape[group_dim]
    width = length // (groups or length)
    for start in range(0, length, width):
        part = activations.narrow(group_dim, start, width).reshape(-1)
        kept = mask.narrow(group_dim, start, width).reshape(-1)
        assert set(kept.nonzero().squeeze(1).tolist()) == largest_by_sorting(part.tolist(), math.ceil(part.numel() / 4))
    assert split.thresholds.numel() == length // width


def test_sample_scope_keeps_the_largest_of_each_and_remembers_nothing() -> None:
    split = SplitPoint(density=0.25, scope="sample", **LOSSLESS)
    for batch in (8, 3):
        activations = normal(batch, 4, 5) * torch.arange(1, batch + 1).view(-1, 1, 1)
        received = split(activations)
        for sample in range(batch):
            kept = set(received[sample].view(-1).nonzero().squeeze(1).tolist())
            assert kept == largest_by_sorting(activations[sample].view(-1).tolist(), 5)
    assert split.thresholds.numel() == 0
    assert split.overflows == 0


@given(
    shape=st.sampled_from([(), (0, 5), (1,), (7,), (4, 6), (3, 4, 5), (2, 0)]),
    scope=st.sampled_from(["tensor", "group", "sample"]),
    density=st.sampled_from([0.05, 0.3, 0.6, 1.0]),
    formats=st.tuples(st.sampled_from(ROW_FORMATS), st.sampled_from(ROW_FORMATS)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    exploration=st.sampled_from([0.0, 0.2]),
    training=st.booleans(),
    seed=st.integers(0, 9),
)
@examples(120)
def test_one_process_sees_what_the_wire_gives(
    shape: tuple[int, ...],
    scope: Any,
    density: float,
    formats: tuple[Any, Any],
    dtype: torch.dtype,
    exploration: float,
    training: bool,
    seed: int,
) -> None:
    if scope == "group" and (len(shape) < 2 or shape[1] == 0):
        scope = "tensor"
    split = SplitPoint(
        density=density,
        scope=scope,
        forward_format=formats[0],
        backward_format=formats[1],
        exploration=exploration,
        seed=seed,
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
        encoded = wired.encode_forward(activations)
        arrived, positions = decode_forward(layout, encoded.positions_payload, encoded.values_payload, dtype)
        assert torch.equal(arrived, received)
        payload = encode_backward(layout, gradient, positions, wired.rounding_seed)
        returned = decode_backward(layout, payload, encoded.positions, dtype)
        assert activations.grad is not None
        assert torch.equal(returned, activations.grad)
        # One mask for both directions.
        if positions is not None:
            outside = torch.ones(layout.numel, dtype=torch.bool)
            outside[positions] = False
            for tensor in (received, activations.grad):
                assert not bool(tensor.detach().reshape(-1)[outside].any())
    assert torch.equal(split.thresholds, wired.thresholds)


def test_inputs_that_are_not_contiguous() -> None:
    activations = normal(6, 8)
    ours = SplitPoint(density=0.3)(activations.t())
    assert torch.equal(ours, SplitPoint(density=0.3)(activations.t().contiguous()))


def test_without_gradient() -> None:
    split = SplitPoint(density=0.3)
    assert not split(normal(6, 8)).requires_grad
    with torch.no_grad():
        assert not split(normal(6, 8).requires_grad_()).requires_grad


def test_under_autocast() -> None:
    model = nn.Sequential(nn.Linear(8, 8), SplitPoint(density=0.3), nn.Linear(8, 1))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(normal(4, 8))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_density_one_in_fp32_changes_nothing() -> None:
    activations = normal(5, 5).requires_grad_()
    split = SplitPoint(density=1.0, **LOSSLESS)
    received = split(activations)
    received.backward(normal(5, 5, seed=1))
    assert torch.equal(received, activations)
    assert torch.equal(activations.grad, normal(5, 5, seed=1))  # type: ignore[arg-type]


def test_bytes_that_would_travel_are_counted_where_gradients_come_back() -> None:
    """Oracle: what a pipeline counts for the same layout: positions and values forward, whole words of values back."""
    split = SplitPoint(density=0.2, forward_format="int8", backward_format="int4")
    layout = split.layout((6, 8))
    model = nn.Sequential(nn.Linear(8, 8), split)
    checkpoint(model, normal(6, 8), use_reentrant=False).sum().backward()
    with torch.no_grad():
        model(normal(6, 8))
    model.eval()(normal(6, 8)).sum().backward()
    totals = split.traffic.totals
    forward = layout.forward_positions_bytes + layout.forward_values_bytes
    assert totals.bytes_sent == forward + 4 * layout.wire_floats
    assert (totals.bytes_dense, totals.entries_sent, totals.entries) == (2 * 4 * 48, 2 * 10, 2 * 48)


# Fixed room


def test_overflow_keeps_the_largest_and_is_counted() -> None:
    split = SplitPoint(density=0.1, guard=False, **LOSSLESS)
    split(normal(20, 20))
    assert split.overflows == 0
    louder = normal(20, 20, seed=1) * 5
    received = split(louder)
    assert set(received.view(-1).nonzero().squeeze(1).tolist()) == largest_by_sorting(louder.view(-1).tolist(), 40)
    assert split.overflows == 1
    split(normal(20, 20) / 5)
    assert split.overflows == 1


def test_a_group_that_overflows_takes_no_room_from_others() -> None:
    split = SplitPoint(density=0.1, scope="group", group_dim=1, guard=False, **LOSSLESS)
    first = normal(50, 4, 10)
    first[:, 1] = 0  # a table not yet trained
    split(first)
    second = normal(50, 4, 10, seed=1)
    counts = (split(second) != 0).sum(dim=(0, 2)).tolist()
    assert counts[1] == 50
    assert all(count >= 25 for count in counts)


def test_payloads_have_one_size_whatever_they_hold() -> None:
    split = SplitPoint(density=0.1, exploration=0.02)
    split.encode_forward(normal(30, 30))
    for scale in (0.0, 0.5, 1.0, 3.0):
        encoded = split.encode_forward(normal(30, 30) * scale)
        layout = split.layout((30, 30))
        assert encoded.positions_payload.numel() == layout.forward_positions_bytes
        assert encoded.values_payload.numel() == layout.forward_values_bytes
        assert encoded.positions is not None
        assert encoded.positions.numel() <= layout.capacity == 90 + 18


# From step to step


@pytest.mark.parametrize("schedule", ["exponential", "linear"])
def test_annealing(schedule: Any) -> None:
    split = SplitPoint(density=0.05, warmup_steps=40, warmup_schedule=schedule, refresh_every=10**6, **LOSSLESS)
    for step in range(45):
        split.advance(step)
        kept = int((split(normal(40, 50, seed=step)) != 0).sum())
        density = warmup_density(0.05, warmup_stage(step, 40), schedule)
        assert kept == pytest.approx(2000 * density, rel=0.2, abs=2)
        if warmup_stage(step, 40) != warmup_stage(step - 1, 40):
            assert kept == math.ceil(2000 * density * (1 - 1e-12))
    assert split.traffic.totals.refreshes == 32  # one a stage, but for the first, which sends everything


def test_refresh_selects_anew_on_its_steps() -> None:
    split = SplitPoint(density=0.1, refresh_every=5, guard=False)
    thresholds = []
    for step in range(12):
        split.advance(step)
        split(normal(20, 20, seed=step))
        thresholds.append(split.thresholds.item())
    changes = [step for step in range(1, 12) if thresholds[step] != thresholds[step - 1]]
    assert changes == [5, 10]
    assert split.traffic.totals.refreshes == 3
    split.request_refresh()
    split(normal(20, 20, seed=99) * 2)
    assert split.thresholds.item() > 1.5 * thresholds[-1]


@pytest.mark.parametrize("guard", [False, True])
def test_guard_holds_the_count_on_drifting_data(guard: bool) -> None:
    split = SplitPoint(density=0.1, scope="group", refresh_every=10**6, guard=guard)
    drift = torch.tensor([0.995, 1.005, 1.0]).view(3, 1)
    scale = torch.ones(3, 1)
    counts = []
    for step in range(120):
        split.advance(step)
        activations = normal(64, 3, 32, seed=step) * scale
        received = split(activations)
        if step >= 80:
            counts.append((received != 0).sum(dim=(0, 2)) / split.layout(activations.shape).group_capacity)
        scale = scale * drift
    mean = torch.stack(counts).mean(0)
    if guard:
        assert bool((mean > 0.8).all())
    else:
        assert mean[0] < 0.4


def test_guard_takes_the_selection_when_far_too_many_reach_a_threshold() -> None:
    split = SplitPoint(density=0.1)
    split(normal(20, 20))
    old = split.thresholds.clone()
    split(normal(20, 20, seed=1) * 50)
    assert split.thresholds.item() > 30 * old.item()


def test_thresholds_stay_as_they_are_during_a_step() -> None:
    split = SplitPoint(density=0.1, **LOSSLESS)
    split.advance(0)
    split(normal(20, 20))
    split.advance(1)
    first = split(normal(20, 20, seed=1) * 0.9)
    for seed in (2, 3):
        split(normal(20, 20, seed=seed) * 3)
        split.advance(1)  # Lightning begins a batch; with accumulated gradients the step is the same
    assert torch.equal(split(normal(20, 20, seed=1) * 0.9), first)
    split(normal(20, 20, seed=4) * 3)
    split.advance(2)
    assert not torch.equal(split(normal(20, 20, seed=1) * 0.9), first)


@pytest.mark.parametrize("settings", [{}, {"exploration": 0.1, "scope": "group"}, {"forward_format": "int4"}])
def test_activation_checkpointing_sees_the_same_mask(settings: dict[str, Any]) -> None:
    def run(recompute: bool) -> list[Tensor]:
        torch.manual_seed(0)
        split = SplitPoint(density=0.2, backward_format="int4", **settings)
        model = nn.Sequential(nn.Linear(10, 16), nn.GELU(), split, nn.Linear(16, 16), nn.GELU())
        for step in range(3):
            split.advance(step)
            for micro_batch in range(2):
                activations = normal(12, 10, seed=10 * step + micro_batch)
                out = checkpoint(model, activations, use_reentrant=False) if recompute else model(activations)
                out.square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for ours, theirs in zip(run(True), run(False), strict=True):
        assert torch.equal(ours, theirs)


# Chance


def test_exploration_share_and_fairness() -> None:
    split = SplitPoint(density=0.1, exploration=0.05, guard=False, **LOSSLESS)
    activations = normal(20, 20)
    hits = torch.zeros(20, 20)
    trials = 800
    for step in range(trials):
        split.advance(step)
        hits += split(activations) != 0
        split.refresh_requested = False
    largest = torch.zeros(400, dtype=torch.bool)
    largest[list(largest_by_sorting(activations.view(-1).tolist(), 40))] = True
    hits = hits.view(-1)
    assert bool((hits[largest] == trials).all())
    share = hits[~largest] / trials
    assert float(share.mean()) == pytest.approx(0.05, abs=0.002)
    assert bool(((share - 0.05).abs() < 5 * math.sqrt(0.05 * 0.95 / trials)).all())


@pytest.mark.parametrize("value_format", ["int8", "int4"])
def test_rounding_is_unbiased_both_ways(value_format: Any) -> None:
    split = SplitPoint(density=1.0, forward_format=value_format, backward_format=value_format)
    trials, forward, backward = 500, torch.zeros(4, 8), torch.zeros(4, 8)
    activations, gradient = normal(4, 8).requires_grad_(), normal(4, 8, seed=1)
    for step in range(trials):
        split.advance(step)
        activations.grad = None
        received = split(activations)
        received.backward(gradient)
        forward += received.detach()
        assert activations.grad is not None
        backward += activations.grad
    for mean, value in ((forward / trials, activations.detach()), (backward / trials, gradient)):
        step_size = value.abs().amax(1, keepdim=True) / (127 if value_format == "int8" else 7) * 1.01
        assert bool(((mean - value).abs() < 5 * 0.5 * step_size / math.sqrt(trials)).all())


def test_micro_batches_and_steps_are_rounded_differently_and_the_global_generator_is_left_alone() -> None:
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
    assert not torch.equal(SplitPoint(density=1.0, forward_format="int4", seed=1)(activations), first)


# Evaluation


def test_evaluation_is_deterministic_and_changes_nothing() -> None:
    split = SplitPoint(density=0.2, forward_format="int4", exploration=0.1)
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
    assert torch.equal(state["thresholds"], split.thresholds)


def test_evaluation_before_training_selects_from_its_own_batch() -> None:
    split = SplitPoint(density=0.2, **LOSSLESS).eval()
    for seed in range(2):
        assert int((split(normal(20, 20, seed=seed)) != 0).sum()) == 80
    assert split.refresh_requested
    assert split.thresholds_in_use() == []


def test_evaluation_may_be_dense() -> None:
    split = SplitPoint(density=0.2, forward_format="int4", compress_evaluation=False).eval()
    activations = normal(20, 20)
    assert torch.equal(split(activations), activations)
    assert split.layout((20, 20)).sends_everything
    encoded = split.encode_forward(activations)
    received, _ = decode_forward(split.layout((20, 20)), encoded.positions_payload, encoded.values_payload)
    assert torch.equal(received, activations)
    assert int((split.train()(activations) != 0).sum()) <= 80


# State


@pytest.mark.parametrize("scope", ["tensor", "group", "sample"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(scope: Any) -> None:
    def make() -> SplitPoint:
        return SplitPoint(density=0.2, scope=scope, forward_format="int4", exploration=0.05, warmup_steps=8)

    def steps(split: SplitPoint, start: int, stop: int) -> list[Tensor]:
        outs = []
        for step in range(start, stop):
            split.advance(step)
            outs += [split(normal(12, 5, 8, seed=2 * step + i)) for i in range(2)]
        return outs

    whole = make()
    expected = steps(whole, 0, 30)[-26:]
    first = make()
    steps(first, 0, 17)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = make()
    second.load_state_dict(torch.load(file, weights_only=True))
    for ours, theirs in zip(steps(second, 17, 30), expected, strict=True):
        assert torch.equal(ours, theirs)
    evaluated = make().eval()
    evaluated.load_state_dict(whole.state_dict())
    assert torch.equal(evaluated(normal(12, 5, 8)), whole.eval()(normal(12, 5, 8)))


def test_state_saved_before_a_selection_selects() -> None:
    first = SplitPoint(density=0.2, warmup_steps=64)
    for step in range(2):
        first.advance(step)
        first(normal(20, 20))  # everything is sent in the first stage: nothing to select
    second = SplitPoint(density=0.2, warmup_steps=64)
    second.load_state_dict(first.state_dict())
    second.advance(40)
    second(normal(20, 20))
    assert second.thresholds.item() > 0


def test_a_refresh_that_was_asked_for_is_not_forgotten() -> None:
    first = SplitPoint(density=0.2)
    first(normal(20, 20))
    first.request_refresh()
    second = SplitPoint(density=0.2)
    second.load_state_dict(first.state_dict())
    second(normal(20, 20, seed=1) * 9)
    assert second.traffic.totals.refreshes == 1


def test_another_density_selects_anew() -> None:
    first = SplitPoint(density=0.2)
    first.advance(3)
    first(normal(20, 20))
    second = SplitPoint(density=0.05)
    second.load_state_dict(first.state_dict())
    second(normal(20, 20))
    assert second.thresholds.item() > first.thresholds.item()


def test_thresholds_stay_fp32_and_follow_the_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), SplitPoint(density=0.5))
    model.train()(normal(4, 4))
    split = model[1]
    old = split.thresholds.clone()
    model.bfloat16()
    assert split.thresholds.dtype == torch.float32
    assert torch.equal(split.thresholds, old)
    assert split(normal(4, 4).bfloat16()).dtype == torch.bfloat16
    assert model.to("meta")[1].thresholds.device.type == "meta"


def test_buffers_keep_their_identity() -> None:
    """DistributedDataParallel broadcasts the buffers it saw when it was made."""
    split = SplitPoint(density=0.2, scope="group")
    before = [id(buffer) for buffer in split.buffers()]
    for step in range(3):
        split.advance(step)
        split(normal(8, 4, 4))
    assert [id(buffer) for buffer in split.buffers()] == before


def test_what_is_shown_and_logged() -> None:
    split = SplitPoint(density=0.2, scope="group", groups=2)
    assert "density=0.2, scope='group'" in repr(split)
    split(normal(8, 4))
    assert split.thresholds_in_use() == split.thresholds.tolist()


def test_rooms_are_pure() -> None:
    """No network and no Lightning in here: those are the business of whoever puts payloads on a wire."""
    for path in Path(lightning_dct.activations.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert not name.startswith(("lightning.", "pytorch_lightning", "torch.distributed")), (path, name)


@pytest.mark.parametrize("scope", ["tensor", "group", "sample"])
def test_a_model_learns_through_a_split_point(scope: Any) -> None:
    torch.manual_seed(0)
    split = SplitPoint(density=0.2, scope=scope, warmup_steps=32, forward_format="int8", backward_format="int4")
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), split, nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(120):
        split.advance(step)
        inputs = normal(64, 8, seed=step)
        loss = (model(inputs).squeeze(1) - inputs[:, 0] * inputs[:, 1].sign()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
