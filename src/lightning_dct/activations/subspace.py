"""A subspace and an anchor: few numbers of each token cross, and the receiver adds what it knows of it by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_dct.activations.layout import ActivationLayout
from lightning_dct.activations.settings import RowFormat
from lightning_dct.activations.split_point import SplitPoint
from lightning_dct.config import check_integer


class CodePoint(SplitPoint):
    """A split point that codes cross, all their entries, counted against the activations that they stand for.

    Args:
        width: Entries of a token before it was encoded.
        **settings: ``forward_format``, ``backward_format``, ``compress_evaluation`` and ``seed`` of
            :class:`~lightning_dct.activations.SplitSettings`.
    """

    def __init__(self, width: int, **settings: Any) -> None:
        super().__init__(density=1.0, **settings)
        self.width = width

    def entries_due(self, layout: ActivationLayout) -> int:
        """Entries of the activations, not of their code."""
        return layout.numel // max(layout.row_length, 1) * self.width


class Anchored(nn.Module):
    """The receiving end where tokens are known: ``U c + A[token]``, with the fixed basis ``U`` and a learned ``A``.

    Args:
        basis: ``U``, the layer from codes back to the whole width.
        num_tokens: Rows of ``A``: one more than the largest token id.
    """

    def __init__(self, basis: nn.Linear, num_tokens: int) -> None:
        super().__init__()
        self.basis = basis
        self.anchor = nn.Embedding(num_tokens, basis.out_features)
        nn.init.normal_(self.anchor.weight, std=basis.out_features**-0.5)

    def forward(self, codes: Tensor, tokens: Tensor) -> Tensor:
        """Map codes ``[..., rank]`` and the ids of their tokens, integers ``[...]``, to ``[..., width]``.

        Raises:
            ValueError: The ids are not those of the tokens that the codes stand for.
        """
        if tokens.is_floating_point() or tokens.shape != codes.shape[:-1]:
            raise ValueError(
                f"`tokens` must be an integer for each of the {list(codes.shape[:-1])} codes that have crossed; it is"
                f" {tokens.dtype} of shape {list(tokens.shape)}. Give the ids that the stage before was given, as in"
                " `network(ids, tokens=ids)`, or make the `subspace` without `num_tokens` where the network's input is"
                " no stream of tokens."
            )
        return self.basis(codes) + self.anchor(tokens)


def subspace(
    width: int,
    rank: int,
    num_tokens: int | None = None,
    *,
    forward_format: RowFormat = "int8",
    backward_format: RowFormat = "int4",
    compress_evaluation: bool = True,
    seed: int = 0,
) -> tuple[nn.Linear, CodePoint, nn.Module]:
    """Three modules to stand where one :class:`~lightning_dct.SplitPoint` stands between two stages.

    ::

        forward     c = U^T h crosses;          the next module sees U c + A[token]
        backward    dL/dc = U^T g crosses

    with ``U [width, rank]`` orthonormal, drawn once from ``seed`` and fixed, and ``A [num_tokens, width]`` a table that
    lives on the stage that receives and is trained with it. Ids do not cross: every rank of a pipeline reads the
    batch, and the network is a :class:`~lightning_dct.SplitSequential` that is called with ``tokens=``. Backward is
    the exact gradient of forward but for the rounding, so the layers in front of the border learn to write into the
    subspace what the token alone does not say; whatever else they write does not cross.

    This changes the model, as a bottleneck does: train it with the three modules in place, in one process or in two.
    The subspace is that of Ramasinghe et al., *Protocol Models*, 2025 (arXiv 2506.01260), without constraints on the
    weights and with a table that is learned; a fixed random basis and an anchor are from MAPL (arXiv 2606.05484),
    whose anchor is subtracted by the sender too. That changes only coordinates that the sender can write as well.

    Args:
        width: Entries of a token, the last dimension of what crosses.
        rank: How many numbers of each cross, each way; at most ``width``.
        num_tokens: How many different tokens there are; None where the network's input is no stream of tokens: then
            the receiver learns a mean in place of ``A[token]``, and the network needs no ``tokens=``.
        forward_format: How coordinates are written, as :class:`~lightning_dct.activations.SplitSettings` has it.
        backward_format: How their gradients are written.
        compress_evaluation: Whether evaluation rounds too.
        seed: Draws the basis, and rounds. The same on every rank.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting is out of range.

    Example:
        >>> network = nn.Sequential(nn.Linear(8, 16), *subspace(16, rank=4), nn.Linear(16, 2))
        >>> network(torch.zeros(3, 8)).shape
        torch.Size([3, 2])
    """
    check_integer("width", width, minimum=1)
    check_integer("rank", rank, minimum=1)
    if rank > width:
        raise ValueError(
            f"`rank` is {rank} and the activations have a `width` of {width}: a subspace has no more dimensions than"
            f" the whole. Choose a `rank` below {width}; a fifth of the width is a good beginning."
        )
    point = CodePoint(
        width,
        forward_format=forward_format,
        backward_format=backward_format,
        compress_evaluation=compress_evaluation,
        seed=seed,
    )
    # Parameters that are not trained rather than buffers, which DistributedDataParallel would send in every step.
    into = nn.Linear(width, rank, bias=False).requires_grad_(False)
    back = nn.Linear(rank, width, bias=num_tokens is None)
    nn.init.orthogonal_(into.weight, generator=torch.Generator().manual_seed(seed))
    back.weight.requires_grad_(False).copy_(into.weight.t())
    if num_tokens is None:
        nn.init.zeros_(back.bias)
        return into, point, back
    check_integer("num_tokens", num_tokens, minimum=1)
    return into, point, Anchored(back, num_tokens)
