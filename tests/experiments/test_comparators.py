"""The methods to compare with, against their equations."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dct.wire import PayloadError
from nlp.comparators import RandomSplit, autoencoder

LOSSLESS: dict[str, Any] = {"forward_format": "fp32", "backward_format": "fp32"}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def crossed(split: nn.Module, activations: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """What is received, and what comes back."""
    activations = activations.clone().requires_grad_()
    received = split(activations)
    received.backward(gradient)
    assert activations.grad is not None
    return received.detach(), activations.grad


@pytest.mark.parametrize("formats", [("fp32", "fp32"), ("int8", "int4")])
@pytest.mark.parametrize("shape", [(6, 4, 10), (10,), (0, 10)])
def test_one_process_sees_what_two_ranks_see(formats: tuple[str, str], shape: tuple[int, ...]) -> None:
    """Oracle: a sender and a receiver that share nothing but their settings and the step, bit for bit."""
    made = RandomSplit(0.3, forward_format=formats[0], backward_format=formats[1], warmup_steps=2)
    sender, receiver = copy.deepcopy(made), copy.deepcopy(made)
    for step in range(5):
        for split in (made, sender, receiver):
            split.advance(step)
        activations, gradient = normal(*shape, seed=step), normal(*shape, seed=50 + step)
        received, returned = crossed(made, activations, gradient)
        layout = receiver.layout(shape)
        encoded = sender.encode_forward(activations)
        assert encoded.positions_payload.numel() == layout.forward_positions_bytes == 12
        arrived, kept = receiver.decode_forward(layout, *encoded[:2], torch.float32)
        assert torch.equal(arrived, received)
        payload = receiver.encode_backward(layout, gradient, kept, receiver.rounding_seed)
        assert torch.equal(sender.decode_backward(layout, payload, encoded.positions, torch.float32), returned)


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
    assert not torch.equal(RandomSplit(0.2, seed=1, **LOSSLESS)(activations), RandomSplit(0.2, **LOSSLESS)(activations))
    assert torch.equal(RandomSplit(1.0, **LOSSLESS)(activations), activations)


def test_another_number_of_entries_is_no_payload() -> None:
    split = RandomSplit(0.2)
    encoded = split.encode_forward(normal(8, 5))
    encoded.positions_payload[4] = 7
    with pytest.raises(PayloadError, match="claims 7 entries where 8 are drawn"):
        split.decode_forward(split.layout((8, 5)), *encoded[:2], torch.float32)


def test_an_autoencoder_is_two_matrices_that_learn() -> None:
    """Oracle: D E h + b and its gradients; both matrices learn."""
    encoder, point, decoder = autoencoder(10, 3, **LOSSLESS)
    activations, gradient = normal(6, 4, 10), normal(6, 4, 10, seed=1)
    received, returned = crossed(nn.Sequential(encoder, point, decoder), activations, gradient)
    torch.testing.assert_close(received, activations @ encoder.weight.t() @ decoder.weight.t() + decoder.bias)
    torch.testing.assert_close(returned, gradient @ decoder.weight @ encoder.weight)
    assert encoder.weight.grad is not None
    assert decoder.weight.grad is not None
