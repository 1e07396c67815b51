"""A subspace and an anchor: few numbers per token are sent, and the receiver adds a learned vector for the token."""

import torch
from torch import Tensor, nn

from lightning_dct.activations.split_point import RowFormat, SplitPoint
from lightning_dct.config import check_integer

# Adam's steps have the same size for all weights, and that is too small for the table: see
# docs/evidence/between_stages.md.
ANCHOR_GAIN = 5.0


class Anchored(nn.Module):
    """The receiving end, ``U c + A[token]``, with a fixed basis ``U`` and a learned table ``A``.

    ``A`` is ``ANCHOR_GAIN`` times the weights of ``anchor``. So Adam's step for it is that many times as large.
    """

    def __init__(self, basis: nn.Linear, num_tokens: int) -> None:
        super().__init__()
        self.basis = basis
        self.anchor = nn.Embedding(num_tokens, basis.out_features)
        nn.init.normal_(self.anchor.weight, std=basis.out_features**-0.5 / ANCHOR_GAIN)

    def forward(self, codes: Tensor, tokens: Tensor) -> Tensor:
        """Map codes ``[..., rank]`` and the ids of their tokens, integers ``[...]``, to ``[..., width]``.

        Raises:
            ValueError: The ids are not those of the tokens that the codes stand for.
        """
        if tokens.is_floating_point() or tokens.shape != codes.shape[:-1]:
            raise ValueError(
                f"`tokens` must be an integer for each of the {list(codes.shape[:-1])} codes that have crossed; it is"
                f" {tokens.dtype} of shape {list(tokens.shape)}. Give the ids that the first stage gets, as in"
                " `network(ids, tokens=ids)`, or make the `subspace` without `num_tokens` if the network's input is"
                " not a sequence of tokens."
            )
        return torch.add(self.basis(codes), self.anchor(tokens), alpha=ANCHOR_GAIN)


def subspace(
    width: int,
    rank: int,
    num_tokens: int | None = None,
    *,
    forward_format: RowFormat = "int8",
    backward_format: RowFormat = "int4",
    seed: int = 0,
) -> tuple[nn.Linear, SplitPoint, nn.Module]:
    """Three modules in place of one :class:`~lightning_dct.SplitPoint` between two stages.

    ::

        forward     c = U^T h is sent;          the next module gets U c + A[token]
        backward    dL/dc = U^T g is sent

    ``U [width, rank]`` is orthonormal, drawn once from ``seed``, and fixed. ``A [num_tokens, width]`` is a table on the
    receiving stage, which trains it. Ids are not sent: every rank of a pipeline reads the batch, and the network is a
    :class:`~lightning_dct.SplitSequential` that is called with ``tokens=``. Backward is the exact gradient of forward,
    except for rounding. So the layers before the border learn to put into the subspace what does not follow from the
    token. Components outside the subspace are not sent.

    This changes the model, as a bottleneck does: train it with the three modules in place, in one process or in two.
    The subspace is that of Ramasinghe et al., *Protocol Models*, 2025 (arXiv 2506.01260), without constraints on the
    weights and with a learned table. A fixed random basis and an anchor are from MAPL (arXiv 2606.05484), whose sender
    also subtracts the anchor. That changes only coordinates that the sender can write as well.

    Args:
        width: Entries per token, the last dimension of the activations.
        rank: Numbers per token that are sent, each way; at most ``width``.
        num_tokens: Number of different tokens. None where the network's input is not a sequence of tokens: then the
            receiver learns a mean instead of ``A[token]``, and the network needs no ``tokens=``.
        forward_format: Of the coordinates, as for :class:`~lightning_dct.SplitPoint`.
        backward_format: Of their gradients.
        seed: For the basis and for rounding, the same on every rank.

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
            f"`rank` is {rank} and the activations have a `width` of {width}: a subspace cannot have more dimensions."
            f" Choose a `rank` below {width}; a fifth of the width is a good start."
        )
    point = SplitPoint(1.0, forward_format=forward_format, backward_format=backward_format, seed=seed)
    point.width = width
    # Frozen parameters instead of buffers, which DistributedDataParallel would send in every step.
    into = nn.Linear(width, rank, bias=False).requires_grad_(False)
    back = nn.Linear(rank, width, bias=num_tokens is None)
    nn.init.orthogonal_(into.weight, generator=torch.Generator().manual_seed(seed))
    back.weight.requires_grad_(False).copy_(into.weight.t())
    if num_tokens is None:
        nn.init.zeros_(back.bias)
        return into, point, back
    check_integer("num_tokens", num_tokens, minimum=1)
    return into, point, Anchored(back, num_tokens)
