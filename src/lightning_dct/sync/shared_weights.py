"""Two sets of weights on every rank: its own, and the shared ones.

A rank trains its *own* weights. The *shared* weights change at exchanges only, by the same amount
on every rank, so they are bitwise identical everywhere. The difference of the two is the residual.

Either set can be in the model; :mod:`lightning_dct.sync.views` says which one is. Exchanging them
exchanges pointers and copies nothing. If others see the memory of a parameter, as a view that the
user has kept, or another process, contents are exchanged instead: it stays one memory.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_dct.compress.awaited import must_not_wait, read_together
from lightning_dct.compress.bucket_plan import Bucket, local_of, real_numel

# What kernels can read and write in place.
IN_PLACE = {torch.float32, torch.float64}
# Who hold the storage of a parameter that nobody else sees: the parameter, and the object that is
# asked.
HOLDERS = 2
_compare_memory = ctypes.CDLL(None).memcmp
_compare_memory.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class SharedWeights:
    """The shared weights.

    Attributes:
        parameters: The parameters that have both sets of weights, by name.
        sizes: Real numbers of each on this rank.
    """

    def __init__(self) -> None:
        self.parameters: dict[str, Tensor] = {}
        self.sizes: dict[str, int] = {}
        self._shared: dict[str, Tensor] = {}
        # Residuals that are kept apart from own weights, as real numbers.
        self._held: dict[str, Tensor] = {}
        # Kept as long as their weights lie at the same addresses.
        self._buckets: dict[tuple[str, ...], tuple[list[int], Bucket | None]] = {}
        # While the shared weights are in the model: this rank's own, and copies of the shared ones
        # to compare with. And the parameters of which contents have been exchanged; their copies
        # are the memory of the shared weights.
        self._own: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}
        self._exchanged: set[str] = set()
        # What was written over since training was interrupted, by parameter: the shared weights,
        # and this rank's own.
        self._unwritten: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def shown(self) -> bool:
        """Whether the shared weights are in the model."""
        return bool(self._own)

    def adopt(self, name: str, parameter: Tensor) -> None:
        """Add a parameter; its weights, which must be the same on every rank, become the shared
        ones.
        """
        if name not in self.parameters:
            self.parameters[name] = parameter
            self.sizes[name] = real_numel(parameter)
            self._shared[name] = local_of(parameter).detach().clone()

    def forget(self) -> None:
        """Forget all parameters; :meth:`adopt` takes the weights that they have by then."""
        self.parameters = {}
        self.sizes = {}
        self._shared = {}
        self._held = {}
        self._buckets = {}

    def shared(self, name: str) -> Tensor:
        """The shared weights of a parameter, in its shape and dtype; only exchanges change them, in
        place.
        """
        return self._shared[name]

    def seen(self) -> dict[str, Tensor]:
        """The shared weights by name, with what has been written into them since they are in the
        model.
        """
        in_model = {name: local_of(parameter).data for name, parameter in self.parameters.items()}
        return in_model if self.shown else self._shared

    def own(self, name: str) -> Tensor:
        """This rank's own weights of a parameter, in its shape and dtype, to be changed in
        place.
        """
        return self._own[name] if name in self._own else local_of(self.parameters[name]).data

    def share_own(self, name: str) -> None:
        """Make this rank's own weights the shared ones, where those of all ranks are alike."""
        self._shared[name].copy_(self.own(name))

    def show(self) -> None:
        """Put the shared weights that are not there into the model."""
        hidden = [name for name in self.parameters if name not in self._own]
        ours = self._views_of_storages() if hidden else Counter()
        for name in hidden:
            parameter = self.parameters[name]
            shared = self._shared[name]
            if self._is_seen_by_others(parameter, ours):
                self._exchanged.add(name)
                self._shared[name] = local_of(parameter).data
                self._own[name] = self._shared[name].clone()
                self._before[name] = shared
                self._shared[name].copy_(shared)
            else:
                self._own[name] = parameter.data
                parameter.data = shared
                self._before[name] = shared.clone()

    def _views_of_storages(self) -> Counter[int]:
        """How many tensors with each storage, by address, this object keeps in buckets: views, and
        what they are of.
        """
        buckets = [bucket for _, bucket in self._buckets.values() if bucket is not None]
        views = [view for bucket in buckets for view in (*bucket.inputs, *bucket.references)]
        kept = chain(views, (view._base for view in views if view._base is not None))
        return Counter(tensor.untyped_storage().data_ptr() for tensor in kept)

    def _is_seen_by_others(self, parameter: Tensor, ours: Mapping[int, int]) -> bool:
        """Whether a parameter's memory is also that of another tensor or array than ``ours``, or of
        another process.
        """
        local = local_of(parameter)
        storage = local.untyped_storage()
        is_larger = storage.nbytes() > local.nbytes
        in_processes = local.is_cpu and storage.is_shared()
        holders = torch._C._storage_Use_Count(storage._cdata) - ours.get(storage.data_ptr(), 0)
        return is_larger or in_processes or holders > HOLDERS

    @property
    def held(self) -> Mapping[str, Tensor]:
        """Residuals that own weights do not contain, by parameter; see :meth:`hold_back`."""
        return self._held

    def hold_back(self, names: Sequence[str]) -> None:
        """Keep the residuals of some parameters apart until the next exchange, so that own weights
        are the shared ones.

        Where ranks pull in opposite directions, each would otherwise train on weights that lie in
        its own direction.
        """
        for name in names:
            own = as_real(self.own(name))
            shared = as_real(self._shared[name])
            self._held[name] = own - shared
            own.copy_(shared)

    def take_back(self, names: Sequence[str]) -> None:
        """Add the residuals that were kept apart to own weights again."""
        for name in names:
            if name in self._held:
                as_real(self.own(name)).add_(self._held.pop(name))

    def hold_saved(self, name: str, own: Tensor, held: Tensor) -> None:
        """Continue with saved own weights, and with a residual that was kept apart from them."""
        self.set_own(name, own)
        self._held[name] = held.to(self._shared[name].device)

    def with_held(self, name: str, own: Tensor) -> Tensor:
        """Own weights of a parameter with its residual, if that is kept apart."""
        if name not in self._held:
            return own
        whole = own.clone()
        as_real(whole).add_(self._held[name])
        return whole

    def settle(self) -> None:
        """Have training continue from what was written into the shared weights since they are in
        the model.

        This rank's own weights move by the same, so they keep what this rank has not sent. What is
        written and taken back before training goes on leaves every bit as it was. Contents are
        compared, because writes through ``.data`` leave a parameter's version as it was, and may
        give it other memory.
        """
        for name, before in self._before.items():
            own, shown = self.settled(name)
            if own is not self._own[name]:
                if name not in self._unwritten:
                    self._unwritten[name] = before.clone(), self._own[name].clone()
                self._own[name].copy_(own)
                self._shared[name].copy_(shown)

    def settled(self, name: str) -> tuple[Tensor, Tensor]:
        """This rank's own and the shared weights of a parameter as :meth:`settle` would leave
        them.
        """
        own = self.own(name)
        before = self._before.get(name)
        shown = local_of(self.parameters[name]).data
        if before is None or (not must_not_wait(shown.device) and are_same_bits(shown, before)):
            return own, self._shared[name]
        shared, own = self._unwritten.get(name, (before, own))
        # An own weight that is not finite can be mended by writing another.
        not_sent = own - shared
        as_real(not_sent).nan_to_num_(0.0, 0.0, 0.0)
        return torch.where(shown == shared, own, shown + not_sent), shown

    def continue_training(self) -> None:
        """Put this rank's own weights into the model, which change from now on."""
        self.hide()
        self._unwritten.clear()

    def hide(self) -> None:
        """Put this rank's own weights into the model again."""
        self.settle()
        for name, own in self._own.items():
            if name in self._exchanged:
                in_model = self._shared[name]
                self._shared[name] = self._before[name]
                self._shared[name].copy_(in_model)
                own = in_model.copy_(own)
            if not _is_the_same_memory(local_of(self.parameters[name]), own):
                self.parameters[name].data = own
        self._own = {}
        self._before = {}
        self._exchanged = set()

    def project(self, function: Callable[[], None] | None) -> None:
        """Apply a function of the model's weights, if any, to both sets, while this rank's own are
        in the model.
        """
        if function is None:
            return
        for _ in range(2):
            function()
            for name, parameter in self.parameters.items():
                self._shared[name], parameter.data = parameter.data, self._shared[name]

    def set_own(self, name: str, saved: Tensor) -> None:
        """Set this rank's own weights of a parameter.

        Raises:
            ValueError: They have another shape than the parameter.
        """
        own = self.own(name)
        if saved.shape != own.shape:
            raise ValueError(
                f"The checkpoint's weights of parameter {name!r} have shape {list(saved.shape)},"
                f" the model's parameter has {list(own.shape)}. Resume with the model that was"
                " saved."
            )
        own.copy_(saved)
        self._held.pop(name, None)
        self._unwritten.pop(name, None)
        if name in self._before:  # what has been loaded into the model goes with them
            self._before[name].copy_(local_of(self.parameters[name]).data)

    def follow_parameters(self) -> None:
        """Move both sets to the parameters' device, while the shared weights are in the model."""
        for name, parameter in self.parameters.items():
            self._shared[name] = parameter.data
            self._own[name] = self._own[name].to(parameter.device)
            if name in self._held:
                self._held[name] = self._held[name].to(parameter.device)
            self._before[name] = self._before[name].to(parameter.device)

    def movement(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """This rank's own weights less the shared ones: real numbers, flattened, one parameter
        after the other.
        """
        weights = [as_real(self.own(name)) for name in names]
        moved = weights[0].new_empty(sum(own.numel() for own in weights), dtype=dtype)
        for name, own, part in zip(
            names, weights, moved.split([own.numel() for own in weights]), strict=True
        ):
            torch.sub(own.to(dtype), as_real(self._shared[name]), out=part.view(own.shape))
            if name in self._held:
                part.add_(self._held[name].reshape(-1))
        return moved

    def bucket(self, names: Sequence[str]) -> Bucket | None:
        """Both sets of weights, flattened, if they can be read in place; else None."""
        weights = [self.parameters[name] for name in names]
        if self.shown or any(isinstance(weight, DTensor) for weight in weights):
            return self._bucket(names)
        key = tuple(names)
        places = [weight.data_ptr() for weight in [*weights, *map(self.shared, names)]]
        if key not in self._buckets or self._buckets[key][0] != places:
            self._buckets[key] = places, self._bucket(names)
        return self._buckets[key][1]

    def _bucket(self, names: Sequence[str]) -> Bucket | None:
        both = [
            [as_real(weights_of(name)) for name in names] for weights_of in (self.own, self.shared)
        ]
        for real in chain(*both):
            on_cpu_or_gpu = real.is_cpu or must_not_wait(real.device)
            if not (on_cpu_or_gpu and real.dtype in IN_PLACE and real.is_contiguous()):
                return None
        inputs, references = ([real.view(-1) for real in weights] for weights in both)
        return Bucket(inputs, references, None)

    def move(self, names: Sequence[str], mean: Tensor, own: Tensor) -> None:
        """Add a mean to both sets of weights, after subtracting from this rank's own what it has
        sent.

        ``mean`` and ``own``, what it has sent, have shape ``[n]``, one parameter after the other.
        """
        self.add_own(names, own, -1.0)
        self.add_own(names, mean, 1.0)
        sizes = [self.sizes[name] for name in names]
        for name, part in zip(names, mean.split(sizes), strict=True):
            shared = as_real(self._shared[name])
            shared.add_(part.view(shared.shape))

    def add_own(self, names: Sequence[str], addend: Tensor, factor: float) -> None:
        """Add ``factor * addend``, shape ``[n]``, to this rank's own weights, one parameter after
        the other.
        """
        sizes = [self.sizes[name] for name in names]
        for name, part in zip(names, addend.split(sizes), strict=True):
            own = as_real(self.own(name))
            own.add_(part.view(own.shape), alpha=factor)

    def norms(self) -> dict[str, float]:
        """Euclidean norm of this rank's residual of each parameter."""
        moved = ((name, self.movement([name], torch.float32)) for name in self.parameters)
        return read_together({name: entries.norm(dtype=torch.float64) for name, entries in moved})


def _is_the_same_memory(one: Tensor, other: Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride(), one.dtype, one.device) == (
        *(other.data_ptr(), other.shape, other.stride(), other.dtype, other.device),
    )


def are_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors on one device are equal; on a CPU, if both are contiguous, bit for bit.

    ``torch.equal`` takes five times as long.
    """
    alike = one.dtype == other.dtype and one.shape == other.shape
    if alike and one.is_cpu and other.is_cpu and one.is_contiguous() and other.is_contiguous():
        return _compare_memory(one.data_ptr(), other.data_ptr(), one.nbytes) == 0
    return torch.equal(one, other)


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as a view of real numbers; any other unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def start_alike(tensors: Iterable[Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Give all ranks of a group the tensors of one rank; a collective call."""
    for tensor in tensors:
        own = as_real(local_of(tensor.detach()))
        same = own.contiguous()
        # As bytes, because backends do not know all kinds of numbers.
        dist.broadcast(same.view(-1).view(torch.uint8), group=group, group_src=source)
        own.copy_(same)
