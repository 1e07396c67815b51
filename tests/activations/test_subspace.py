"""Few numbers a token and what the receiver knows, against the equations in plain matrix
algebra.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_dct import SplitSequential, subspace

LOSSLESS: dict[str, Any] = {"forward_format": "fp32", "backward_format": "fp32"}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


TOKENS = torch.tensor([[0, 3, 1], [2, 3, 0]])


def test_by_its_equations() -> None:
    """Oracle: U U^T h + 5 A[token] and U U^T g; the table has its own gradient, the basis none."""
    modules = subspace(10, 4, num_tokens=5, **LOSSLESS)
    basis = modules[0].weight.t()
    table = modules[2].anchor.weight
    torch.testing.assert_close(basis.t() @ basis, torch.eye(4))
    activations = normal(2, 3, 10).requires_grad_()
    gradient = normal(2, 3, 10, seed=1)
    received = SplitSequential(*modules)(activations, tokens=TOKENS)
    received.backward(gradient)
    torch.testing.assert_close(received, activations @ basis @ basis.t() + 5 * table[TOKENS])
    torch.testing.assert_close(activations.grad, gradient @ basis @ basis.t())
    expected = 5 * functional.one_hot(TOKENS, 5).flatten(0, 1).t().float() @ gradient.flatten(0, 1)
    torch.testing.assert_close(table.grad, expected)
    assert modules[0].weight.grad is None


def test_a_mean_where_there_are_no_tokens() -> None:
    """Oracle: U U^T h + b, and b learns the mean."""
    into, point, back = subspace(10, 4, **LOSSLESS)
    gradient = normal(6, 10)
    received = back(point(into(normal(6, 10, seed=1))))
    received.backward(gradient)
    assert back.weight.grad is None
    torch.testing.assert_close(back.bias.grad, gradient.sum(0))


def test_what_crosses_is_counted_against_the_whole_width() -> None:
    """Oracle: a header; 8 bits a coordinate forward and 4 back, a byte a token and 4 bytes, back to
    whole words.
    """
    into, point, back = subspace(64, 7, forward_format="int8", backward_format="int4")
    back(point(into(normal(6, 64).requires_grad_()))).sum().backward()
    # With nothing trained before the border, a gradient is asked for all the same: `requires_grad_`
    # above.
    totals = point.traffic.totals
    assert totals.bytes_sent == (12 + 4 + 6 + 6 * 7) + -(-(4 + 6 + 3 * 7) // 4) * 4
    assert (totals.bytes_dense, totals.entries_sent) == (2 * 4 * 6 * 64, 2 * 6 * 7)


def test_every_rank_draws_the_same_basis_whatever_it_drew_before() -> None:
    first = subspace(16, 4)[0].weight
    torch.manual_seed(99)
    assert torch.equal(first, subspace(16, 4)[0].weight)
    assert not torch.equal(first, subspace(16, 4, seed=1)[0].weight)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"rank": 17},
            ValueError,
            "`rank` is 17 and the activations have a `width` of 16.*Choose a `rank` below 16",
        ),
        ({"rank": 0}, ValueError, "`rank` must be at least 1"),
        ({"rank": 2.0}, TypeError, "`rank` must be a whole number"),
        ({"rank": 4, "num_tokens": 0}, ValueError, "`num_tokens` must be at least 1"),
        ({"rank": 4, "forward_format": "1bit"}, ValueError, "`forward_format` must be one of"),
    ],
)
def test_wrong_settings_are_named(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        subspace(16, **settings)


def test_no_ids_and_inputs_that_are_no_tokens_are_named() -> None:
    network = SplitSequential(nn.Linear(8, 16), *subspace(16, 4, num_tokens=5))
    with pytest.raises(
        TypeError, match=r"takes 'tokens', which .* call it as in `self.network\(inputs, tokens="
    ):
        network(normal(3, 8))
    for tokens in (normal(3), torch.zeros(3, 8).long()):
        with pytest.raises(
            ValueError,
            match="without `num_tokens` if the network's input is not a sequence of tokens",
        ):
            network(normal(3, 8), tokens=tokens)


def test_a_model_learns_through_it_what_the_token_alone_does_not_say() -> None:
    """Oracle: a target that needs the sender's input and the token; without training the border
    loses most of both.
    """
    torch.manual_seed(0)
    network = SplitSequential(
        nn.Linear(6, 32), nn.Tanh(), *subspace(32, 4, num_tokens=4), nn.Tanh(), nn.Linear(32, 1)
    )
    optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for step in range(200):
        inputs = normal(64, 6, seed=step)
        tokens = inputs[:, 5].gt(0).long() * 3
        loss = (network(inputs, tokens=tokens).squeeze(1) - inputs[:, 0] - tokens).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) / 10 < 0.1 < sum(losses[:10]) / 10
