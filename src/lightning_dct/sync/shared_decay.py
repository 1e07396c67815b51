"""Weight decay of the shared weights, by themselves: the same on every rank, and without a byte.

    S  <-  (1 - lr * weight_decay) S        after each step of an optimizer that decays own weights by as much

Decay is no news, because every rank knows it. Exchanged as an update, it would cost bytes, and it
would be lengthened as if it were noise: weights without gradients would decay up to ``sqrt(W)``
times too fast.

A parameter that some rank has stepped without a gradient does not decay there. So the ranks tell
each other of such parameters now and then, and from then on their decay is a part of their updates.

Where a rank may skip a step by itself, as under a loss scaler, or miss some, as with
``dct_elastic``, ranks do not decay alike. There the shared weights decay at exchanges, by the mean
(:class:`OwnDecay`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dct.compress.awaited import Awaited
from lightning_dct.exchange.collectives import Link, all_reduce_mean
from lightning_dct.sync.shared_weights import SharedWeights, as_real


class SharedDecay:
    """Decays the shared weights of one optimizer's parameters; the same on all ranks.

    Attributes:
        left_out: Parameters that do not decay by themselves.
        known: More of them. They count from the next agreement on, because by then every rank knows
            them.
    """

    def __init__(self) -> None:
        self.left_out: set[str] = set()
        self.known: set[str] = set()
        self._is_awaited = False

    def after_step(
        self,
        optimizer: Optimizer,
        decays: Sequence[bool],
        names: Mapping[Tensor, str],
        weights: SharedWeights,
    ) -> None:
        """Decay shared weights after a step; ``decays`` says of which groups."""
        for group in decaying_groups(optimizer, decays):
            stepped = [names[p] for p in group["params"] if p.requires_grad and p in names]
            decaying = [
                name for name in stepped if name in weights.parameters and name not in self.left_out
            ]
            if shared := [as_real(weights.shared(name)) for name in decaying]:
                torch._foreach_mul_(shared, factor_of(group))

    def agree(
        self,
        names: Sequence[str],
        parameters: Mapping[str, Tensor],
        everyone: Link,
        awaited: Awaited,
    ) -> None:
        """Leave out parameters that a rank has just stepped without a gradient; a collective
        call.
        """
        if self._is_awaited:
            awaited.synchronize()
        self.left_out |= self.known
        self.known = set()
        self._is_awaited = True
        device = parameters[names[0]].device
        without = torch.tensor([float(parameters[name].grad is None) for name in names]).to(
            device, non_blocking=True
        )
        all_reduce_mean(without, everyone).wait()
        awaited.on_ready(without > 0, lambda flags: self._take(names, flags))

    def _take(self, names: Iterable[str], flags: Iterable[int]) -> None:
        self._is_awaited = False
        self.known = {name for name, flag in zip(names, flags, strict=True) if flag} - self.left_out


class OwnDecay:
    """What this rank's own weights have decayed by since the last exchange, where a rank may skip
    steps or miss some.

        rank r         f_r <- (1 - lr * weight_decay) f_r      after each step that it has made, with a gradient
        every rank     F    = mean over ranks of f_r           at an exchange
                       w_r += (F - f_r) S,   S <- F S

    So ``w_r - f_r S``, which this rank has not sent, stays as it is.

    Attributes:
        factors: ``f_r`` by parameter; those that are 1 may be left out.
    """

    def __init__(self) -> None:
        self.factors: dict[str, float] = {}

    def after_step(
        self, optimizer: Optimizer, decays: Sequence[bool], names: Mapping[Tensor, str]
    ) -> None:
        """Note a step that the optimizer has made; ``decays`` says which groups decay."""
        for group in decaying_groups(optimizer, decays):
            factor = float(factor_of(group))
            for name in [names[p] for p in group["params"] if p.grad is not None and p in names]:
                self.factors[name] = self.factors.get(name, 1.0) * factor

    def of(self, names: Iterable[str]) -> Tensor:
        """The factors of some parameters: shape ``[n]``, float64."""
        return torch.tensor([self.factors.get(name, 1.0) for name in names], dtype=torch.float64)

    def agree(self, names: Sequence[str], weights: SharedWeights, everyone: Link) -> None:
        """Decay both sets of weights by what the ranks have decayed by on average; a collective
        call.
        """
        factors = self.of(names).to(weights.own(names[0]).device)
        all_reduce_mean(factors, everyone).wait()
        self.take(names, factors.tolist(), weights)

    def take(self, names: Iterable[str], agreed: Iterable[float], weights: SharedWeights) -> None:
        """Decay both sets of weights by the factors that the ranks have agreed on, by parameter;
        and begin anew.
        """
        for name, factor in zip(names, agreed, strict=True):
            own = self.factors.pop(name, 1.0)
            shared = as_real(weights.shared(name))
            if factor != own:
                as_real(weights.own(name)).add_(shared, alpha=factor - own)
            if factor != 1.0:
                shared.mul_(factor)

    @contextmanager
    def in_shared(self, names: Iterable[str], weights: SharedWeights) -> Iterator[None]:
        """Have the shared weights decayed as this rank's own are within the context, to see what
        these have moved.
        """
        decayed = [name for name in names if self.factors.get(name, 1.0) != 1.0]
        before = {name: weights.shared(name).clone() for name in decayed}
        try:
            for name in decayed:
                as_real(weights.shared(name)).mul_(self.factors[name])
            yield
        finally:
            for name, shared in before.items():
                weights.shared(name).copy_(shared)


def decaying_groups(optimizer: Optimizer, decays: Sequence[bool]) -> Iterator[dict[str, Any]]:
    """The groups of an optimizer whose weights decay, if ``decays`` says of which they would."""
    for group, does in zip(optimizer.param_groups, decays, strict=True):
        if does and not (
            isinstance(group["weight_decay"], float | int) and not group["weight_decay"]
        ):
            yield group


def factor_of(group: Mapping[str, Any]) -> float | Tensor:
    """What a step multiplies the weights of a group with."""
    return 1 - group["lr"] * group["weight_decay"]
