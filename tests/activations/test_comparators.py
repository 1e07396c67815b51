"""The methods to compare with, against their equations in plain matrix algebra."""

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dct.activations import Split
from lightning_dct.activations.comparators import LowRankSplit, RandomSplit, autoencoder
from lightning_dct.wire import PayloadError

LOSSLESS: dict[str, Any] = {"forward_format": "fp32", "backward_format": "fp32"}
KINDS: list[Any] = [RandomSplit, LowRankSplit]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def crossed(split: nn.Module, activations: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """What is received, and what comes back."""
    activations = activations.clone().requires_grad_()
    received = split(activations)
    received.backward(gradient)
    assert activations.grad is not None
    return received.detach(), activations.grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("formats", [("fp32", "fp32"), ("int8", "int4"), ("bf16", "fp32")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(6, 4, 10), (3, 10), (10,), (0, 10)])
def test_one_process_sees_what_two_ranks_see(
    kind: Any, formats: tuple[str, str], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Oracle: a sender and a receiver that share nothing but their settings and the step, bit for bit."""
    made = kind(0.3, forward_format=formats[0], backward_format=formats[1], warmup_steps=2)
    sender, receiver = copy.deepcopy(made), copy.deepcopy(made)
    for step in range(5):
        for split in (made, sender, receiver):
            split.advance(step)
        activations, gradient = normal(*shape, seed=step).to(dtype), normal(*shape, seed=50 + step).to(dtype)
        received, returned = crossed(made, activations, gradient)
        assert (received.dtype, received.shape) == (dtype, activations.shape)
        layout = receiver.layout(shape)
        encoded = sender.encode_forward(activations)
        assert encoded.positions_payload.numel() == layout.forward_positions_bytes
        assert encoded.values_payload.numel() == layout.forward_values_bytes
        arrived, kept = receiver.decode_forward(layout, encoded.positions_payload, encoded.values_payload, dtype)
        assert torch.equal(arrived, received)
        payload = receiver.encode_backward(layout, gradient, kept, receiver.rounding_seed)
        assert payload.numel() == layout.backward_bytes
        assert torch.equal(sender.decode_backward(layout, payload, encoded.positions, dtype), returned)


def test_random_k_sends_as_many_entries_new_ones_each_step_and_the_same_back() -> None:
    """Oracle: counts; over many steps every entry comes equally often."""
    split = RandomSplit(0.2, **LOSSLESS)
    activations, gradient = normal(8, 5) + 10, normal(8, 5, seed=1) + 10
    hits = torch.zeros(8, 5)
    for step in range(400):
        split.advance(step)
        received, returned = crossed(split, activations, gradient)
        mask = received != 0
        assert int(mask.sum()) == 8
        assert torch.equal(received, activations * mask)
        assert torch.equal(returned, gradient * mask)
        hits += mask
    assert bool(((hits / 400 - 0.2).abs() < 5 * math.sqrt(0.2 * 0.8 / 400)).all())
    assert split.layout((8, 5)).forward_positions_bytes == 12
    assert not torch.equal(RandomSplit(0.2, seed=1, **LOSSLESS)(activations), RandomSplit(0.2, **LOSSLESS)(activations))


def test_another_number_of_entries_is_no_payload() -> None:
    split = RandomSplit(0.2)
    encoded = split.encode_forward(normal(8, 5))
    encoded.positions_payload[4] = 7
    with pytest.raises(PayloadError, match="claims 7 entries where 8 are drawn"):
        split.decode_forward(split.layout((8, 5)), *encoded[:2], torch.float32)


def test_low_rank_by_its_equations() -> None:
    """Oracle: V <- orthonormal(H^T H V), H V V^T, G V V^T, with V rounded to bf16."""
    split = LowRankSplit(0.3, **LOSSLESS)
    basis = None
    for step in range(6):
        split.advance(step)
        activations, gradient = normal(6, 4, 10, seed=step), normal(6, 4, 10, seed=50 + step)
        received, returned = crossed(split, activations, gradient)
        tokens = activations.view(-1, 10)
        if basis is not None:
            found = torch.linalg.qr(tokens.t() @ tokens @ basis).Q
            projection = found.bfloat16().float() @ found.bfloat16().float().t()
            torch.testing.assert_close(received.view(-1, 10), tokens @ projection)
            torch.testing.assert_close(returned.view(-1, 10), gradient.view(-1, 10) @ projection)
        assert torch.linalg.matrix_rank(received.view(-1, 10), rtol=1e-4) == 3
        basis = split.basis.clone()
    layout = split.layout((6, 4, 10))
    assert layout.forward_positions_bytes == 12 + 2 * 3 * 10
    assert layout.forward_values_bytes == layout.backward_bytes == 4 * 24 * 3


def test_low_rank_finds_the_subspace_that_there_is() -> None:
    """Oracle: activations of rank 3, which lose nothing but bf16's rounding of the basis; annealing, 1e-2."""
    split = LowRankSplit(0.3, warmup_steps=8, **LOSSLESS)
    mixing = normal(3, 10, seed=9)
    for step in range(20):
        split.advance(step)
        activations = normal(32, 3, seed=step) @ mixing
        received = split(activations)
        torch.testing.assert_close(received, activations, rtol=0.02, atol=0.05)
    assert split.basis.shape == (10, 3)


def test_low_rank_micro_batches_begin_alike_and_evaluation_changes_nothing() -> None:
    split = LowRankSplit(0.3, **LOSSLESS)
    for step in range(3):
        split.advance(step)
        first = split(normal(32, 10, seed=step))
        split(normal(32, 10, seed=10 + step))
    assert torch.equal(split(normal(32, 10, seed=2)), first)
    split.eval()
    before = split.basis.clone()
    outs = [split(normal(32, 10, seed=7)) for _ in range(2)]
    assert torch.equal(*outs)
    assert torch.equal(split.basis, before)


def test_a_batch_that_is_not_finite_passes_and_is_forgotten() -> None:
    split = LowRankSplit(0.3, **LOSSLESS)
    split(normal(32, 10))
    split.advance(1)
    assert not bool(split(normal(32, 10).index_fill(0, torch.tensor([3]), math.nan)).isfinite().all())
    split.advance(2)
    assert bool(split(normal(32, 10)).isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(kind: Any) -> None:
    def steps(split: Split[Any], start: int, stop: int) -> list[Tensor]:
        outs = []
        for step in range(start, stop):
            split.advance(step)
            outs.append(split(normal(12, 10, seed=step)))
        return outs

    whole, first, second = (kind(0.3, warmup_steps=20, forward_format="int4") for _ in range(3))
    expected = steps(whole, 0, 30)[13:]
    steps(first, 0, 13)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert all(torch.equal(one, other) for one, other in zip(steps(second, 13, 30), expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_dense_where_it_should_be(kind: Any) -> None:
    """Oracle: the activations themselves."""
    activations, gradient = normal(12, 10), normal(12, 10, seed=1)
    received, returned = crossed(kind(1.0, **LOSSLESS), activations, gradient)
    assert torch.equal(received, activations)
    assert torch.equal(returned, gradient)
    evaluated = kind(0.3, forward_format="int4", compress_evaluation=False).eval()
    assert torch.equal(evaluated(activations), activations)


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_and_checkpointing(kind: Any) -> None:
    """Oracle: the same gradients without activation checkpointing; bytes are counted once."""
    gradients, counted = [], []
    for recompute in (False, True):
        torch.manual_seed(0)
        split = kind(0.3)
        model = nn.Sequential(nn.Linear(10, 10), split, nn.Linear(10, 4))
        with torch.autocast("cpu", torch.bfloat16):
            out = checkpoint(model, normal(12, 10), use_reentrant=False) if recompute else model(normal(12, 10))
        out.float().square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        counted.append(split.traffic.totals)
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    layout = split.layout((12, 10))
    assert counted[0].bytes_sent == counted[1].bytes_sent
    assert counted[0].bytes_sent == layout.forward_positions_bytes + 2 * 4 * layout.wire_floats
    assert (counted[0].bytes_dense, counted[0].entries_sent, counted[0].entries) == (960, 72, 240)


def test_an_autoencoder_is_two_matrices_around_a_crossing() -> None:
    """Oracle: D E h with the rounding of c = E h on the way, counted against h; both matrices learn."""
    torch.manual_seed(0)
    encoder, point, decoder = autoencoder(10, 0.3, forward_format="int8", backward_format="fp32")
    torch.testing.assert_close(encoder.weight @ encoder.weight.t(), torch.eye(3))
    assert torch.equal(decoder.weight, encoder.weight.t())
    activations, gradient = normal(6, 4, 10), normal(6, 4, 10, seed=1)
    received, returned = crossed(nn.Sequential(encoder, point, decoder), activations, gradient)
    torch.testing.assert_close(received, activations @ encoder.weight.t() @ decoder.weight.t(), rtol=0.05, atol=0.05)
    torch.testing.assert_close(returned, gradient @ decoder.weight @ encoder.weight)
    assert encoder.weight.grad is not None
    assert decoder.weight.grad is not None
    totals = point.traffic.totals
    assert (totals.bytes_dense, totals.entries_sent, totals.entries) == (2 * 4 * 240, 2 * 72, 2 * 240)
    assert totals.bytes_sent == 12 + 2 * 4 * 72  # the words of fp32 both ways


@pytest.mark.parametrize(
    ("make", "settings", "error", "message"),
    [
        (RandomSplit, {"exploration": 0.1}, TypeError, "`exploration` is no setting of RandomSplit, which takes"),
        (LowRankSplit, {"refresh_every": 5}, TypeError, "`refresh_every` is no setting of LowRankSplit"),
        (autoencoder, {"warmup_steps": 5}, TypeError, "`warmup_steps` is no setting of an autoencoder"),
        (LowRankSplit, {"density": 0.0}, ValueError, "`density`"),
        (RandomSplit, {"forward_format": "1bit"}, ValueError, "`forward_format`"),
    ],
)
def test_wrong_settings_are_named(make: Any, settings: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = (10,) if make is autoencoder else ()
    with pytest.raises(error, match=message):
        make(*arguments, **settings)


def test_what_is_shown_and_agreed_on() -> None:
    split = LowRankSplit(0.3)
    assert "LowRankSplit(density=0.3, forward_format='bf16'" in repr(split)
    assert split.agreed_settings() != RandomSplit(0.3).agreed_settings()


@pytest.mark.parametrize("kind", ["random", "low rank", "autoencoder"])
def test_a_model_learns_through_each(kind: str) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"density": 0.3, "forward_format": "int8", "backward_format": "int8"}
    parts = {
        "random": lambda: (RandomSplit(**settings),),
        "low rank": lambda: (LowRankSplit(**settings),),
        "autoencoder": lambda: autoencoder(32, **settings),
    }[kind]()
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), *parts, nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(100):
        for part in parts:
            if isinstance(part, Split):
                part.advance(step)
        inputs = normal(64, 8, seed=step)
        loss = (model(inputs).squeeze(1) - inputs[:, 0] * inputs[:, 1].sign()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
