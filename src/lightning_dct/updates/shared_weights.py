"""Two sets of weights on every rank: its own, and the shared ones.

A rank trains its *own* weights. The *shared* weights change at exchanges only, by the same amount on every rank, so
they are bitwise identical everywhere. The difference of the two is the residual.

Either set can be in the model. Exchanging them exchanges pointers and copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_dct.gradients import compression
from lightning_dct.gradients.awaited import read_together
from lightning_dct.gradients.compression import Bucket
from lightning_dct.gradients.plan import local_of, real_numel

# A prime.
DIGEST_SUMS = 61
# What kernels can read and write in place.
IN_PLACE = {torch.float32, torch.float64}


class SharedWeights:
    """The shared weights.

    Attributes:
        parameters: The parameters that have both sets of weights, by name.
    """

    def __init__(self) -> None:
        self.parameters: dict[str, Tensor] = {}
        self._shared: dict[str, Tensor] = {}
        # While the shared weights are in the model: this rank's own, and how the parameters looked at first.
        self._own: dict[str, Tensor] = {}
        self._looks: dict[str, tuple[int, Tensor]] = {}

    @property
    def shown(self) -> bool:
        """Whether the shared weights are in the model."""
        return bool(self._own)

    def adopt(self, name: str, parameter: Tensor) -> None:
        """Add a parameter; its weights, which must be the same on every rank, become the shared ones."""
        if name not in self.parameters:
            self.parameters[name] = parameter
            self._shared[name] = local_of(parameter).detach().clone()

    def shared(self, name: str) -> Tensor:
        """The shared weights of a parameter, in its shape and dtype; only exchanges change them, in place."""
        return self._shared[name]

    def own(self, name: str) -> Tensor:
        """This rank's own weights of a parameter, in its shape and dtype, to be changed in place."""
        return self._own[name] if name in self._own else local_of(self.parameters[name]).data

    def show(self) -> None:
        """Put the shared weights into the model."""
        if self.shown:
            return
        for name, parameter in self.parameters.items():
            self._own[name], parameter.data = parameter.data, self._shared[name]
            self._looks[name] = parameter._version, digest(parameter)

    def hide(self) -> None:
        """Put this rank's own weights into the model again.

        If something has written into the shared weights meanwhile, such as weight averaging or loading a checkpoint,
        training continues from what it has written. Writes through ``.data`` do not raise a parameter's version, and
        may give it other memory, so contents are compared, too.
        """
        own, self._own = self._own, {}
        for name, weights in own.items():
            parameter = self.parameters[name]
            if self._is_written(name, parameter):
                weights.copy_(parameter.data)
                self._shared[name].copy_(parameter.data)
            parameter.data = weights

    def _is_written(self, name: str, shown: Tensor) -> bool:
        version, looks = self._looks[name]
        return shown._version != version or not torch.equal(looks, digest(shown).to(looks.device))

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Have the shared weights in the model within the context."""
        already = self.shown
        self.show()
        try:
            yield
        finally:
            if not already:
                self.hide()

    def set_own(self, name: str, saved: Tensor) -> None:
        """Set this rank's own weights of a parameter.

        Raises:
            ValueError: They have another shape than the parameter.
        """
        own = self.own(name)
        if saved.shape != own.shape:
            raise ValueError(
                f"The checkpoint's weights of parameter {name!r} have shape {list(saved.shape)}, the model's parameter"
                f" has {list(own.shape)}. Resume with the model that was saved."
            )
        own.copy_(saved)

    def follow_parameters(self) -> None:
        """Move both sets to the parameters' device, while the shared weights are in the model."""
        for name, parameter in self.parameters.items():
            self._shared[name] = parameter.data
            self._own[name] = self._own[name].to(parameter.device)

    def movement(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """This rank's own weights less the shared ones: real numbers, flattened, one parameter after the other."""
        weights = [as_real(self.own(name)) for name in names]
        moved = weights[0].new_empty(sum(own.numel() for own in weights), dtype=dtype)
        for name, own, part in zip(names, weights, moved.split([own.numel() for own in weights]), strict=True):
            torch.sub(own.to(dtype), as_real(self._shared[name]), out=part.view(own.shape))
        return moved

    def bucket(self, names: Sequence[str]) -> Bucket | None:
        """Both sets of weights, flattened, where the CPU can read them in place; None if it cannot."""
        sets = [[as_real(own), as_real(self._shared[name])] for name in names for own in [self.own(name)]]
        every = [weights for both in sets for weights in both]
        if any(w.device.type in compression.WITHOUT_WAITING for w in every):
            return None
        if not all(w.device.type == "cpu" and w.dtype in IN_PLACE and w.is_contiguous() for w in every):
            return None
        news, bases = zip(*([weights.view(-1) for weights in both] for both in sets), strict=True)
        return Bucket(news, bases, None)

    def move(self, names: Sequence[str], mean: Tensor, own: Tensor) -> None:
        """Add a mean to both sets of weights, after subtracting from this rank's own what it has sent.

        ``mean`` and ``own``, what it has sent, have shape ``[n]``, one parameter after the other.
        """
        self.add_own(names, own, -1.0)
        self.add_own(names, mean, 1.0)
        sizes = [real_numel(self.parameters[name]) for name in names]
        for name, part in zip(names, mean.split(sizes), strict=True):
            shared = as_real(self._shared[name])
            shared.add_(part.view(shared.shape))

    def add_own(self, names: Sequence[str], addend: Tensor, factor: float) -> None:
        """Add ``factor * addend``, shape ``[n]``, to this rank's own weights, one parameter after the other."""
        sizes = [real_numel(self.parameters[name]) for name in names]
        for name, part in zip(names, addend.split(sizes), strict=True):
            own = as_real(self.own(name))
            own.add_(part.view(own.shape), alpha=factor)

    def norms(self) -> dict[str, float]:
        """Euclidean norm of this rank's residual of each parameter."""
        moved = ((name, self.movement([name], torch.float32)) for name in self.parameters)
        return read_together({name: entries.norm(dtype=torch.float64) for name, entries in moved})


def digest(tensor: Tensor) -> Tensor:
    """Sums of the bits of a tensor's entries, int64: another tensor of this size hardly has the same."""
    bits = as_real(local_of(tensor).detach()).reshape(-1)
    bits = bits.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()])
    # Neighbours are in different sums, and so are those of a matrix in one column or row.
    rows = bits.numel() // DIGEST_SUMS
    whole = bits[: rows * DIGEST_SUMS].view(rows, DIGEST_SUMS)
    return torch.cat([whole.sum(0, dtype=torch.int64), bits[rows * DIGEST_SUMS :].to(torch.int64)])


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as a view of real numbers; any other unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
