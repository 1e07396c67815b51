"""Weight decay of the shared weights, by themselves: the same on every rank, and without a byte.

    S  <-  (1 - lr * weight_decay) S        after each step of an optimizer that decays own weights by as much

Decay is no news, because every rank knows it. Exchanged as an update, it would cost bytes, and it would be lengthened
as if it were noise: weights without gradients would decay up to ``sqrt(W)`` times too fast.

A parameter that some rank has stepped without a gradient does not decay there. So the ranks tell each other of such
parameters now and then, and from then on their decay is a part of their updates.
"""

from collections.abc import Iterable, Mapping, Sequence

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
        known: More of them. They count from the next agreement on, because by then every rank knows them.
    """

    def __init__(self) -> None:
        self.left_out: set[str] = set()
        self.known: set[str] = set()
        self._is_awaited = False

    def after_step(
        self, optimizer: Optimizer, decays: Sequence[bool], names: Mapping[Tensor, str], weights: SharedWeights
    ) -> None:
        """Decay shared weights after a step; ``decays`` says of which groups."""
        for group, does in zip(optimizer.param_groups, decays, strict=True):
            if not does or (isinstance(group["weight_decay"], float | int) and not group["weight_decay"]):
                continue
            stepped = [names[p] for p in group["params"] if p.requires_grad and p in names]
            decaying = [name for name in stepped if name in weights.parameters and name not in self.left_out]
            if shared := [as_real(weights.shared(name)) for name in decaying]:
                torch._foreach_mul_(shared, 1 - group["lr"] * group["weight_decay"])

    def agree(self, names: Sequence[str], parameters: Mapping[str, Tensor], everyone: Link, awaited: Awaited) -> None:
        """Leave out parameters that a rank has just stepped without a gradient; a collective call."""
        if self._is_awaited:
            awaited.synchronize()
        self.left_out |= self.known
        self.known, self._is_awaited = set(), True
        device = parameters[names[0]].device
        without = torch.tensor([float(parameters[name].grad is None) for name in names]).to(device, non_blocking=True)
        all_reduce_mean(without, everyone).wait()
        awaited.on_ready(without > 0, lambda flags: self._take(names, flags))

    def _take(self, names: Iterable[str], flags: Iterable[int]) -> None:
        self._is_awaited = False
        self.known = {name for name, flag in zip(names, flags, strict=True) if flag} - self.left_out
