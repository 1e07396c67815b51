"""The exchange of gradient shards between replicas, through FSDP's all-reduce hook."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from lightning_dct.compress.bucket_plan import local_of
from lightning_dct.config import DCTConfig
from lightning_dct.exchange.base import Exchange, complete
from lightning_dct.exchange.collectives import Link
from lightning_dct.sync.gradients import GradientSynchronizer
from lightning_dct.traffic import Clock, all_gather_bytes


class ShardGradientSynchronizer(GradientSynchronizer):
    """Averages this rank's gradient shards over the replicas, one unit of FSDP at a time.

    ``shards`` is the number of ranks per replica.

    Attributes:
        is_blocked: Whether gradients only accumulate on this rank, until the next backward that is not blocked.
    """

    def __init__(self, config: DCTConfig, parameter_names: Mapping[Tensor, str], exchange: Exchange, shards: int):
        super().__init__(config, parameter_names, exchange)
        # FSDP has the hook's work done on a stream of its own, so that its time is not what a step loses.
        self.traffic.clock = Clock()
        self.is_blocked = False
        self._waits: set[str] = set()
        self._shards = shards

    def attach(self, modules: Iterable[FSDPModule]) -> None:
        """Register the hook with all modules that FSDP gathers."""
        for module in modules:
            module.set_all_reduce_hook(partial(self._reduce, _units_of(module)))
            # The hook divides, so that accumulated and received gradients have the same unit.
            module.set_gradient_divide_factor(1.0)
            # So that all parameters of a unit are in its flat shard.
            module.set_reduce_scatter_unused_params(True, recurse=False)

    @staticmethod
    def detach(modules: Iterable[FSDPModule]) -> None:
        """Undo :meth:`attach`."""
        for module in modules:
            for unit in _units_of(module):
                unit._all_reduce_hook = unit.gradient_divide_factor = None
            module.set_reduce_scatter_unused_params(False, recurse=False)

    def finish(self) -> None:
        """End a backward that has exchanged gradients."""
        if self._pending:
            self._finish()

    @torch.no_grad()
    def _reduce(self, units: list[Any], flat: Tensor) -> None:
        """Replace a unit's sum over a replica, this rank's padded shards one after the other, by the mean of all."""
        _keep_for_this_stream(flat)
        flat.div_(self._shards)
        parts = [part for part in units[0].fsdp_params if part.sharded_param.requires_grad]
        padded = [part.padded_sharded_param_size.numel() for part in parts]
        if sum(padded) != flat.numel():
            raise RuntimeError(
                f"FSDP has reduced {flat.numel()} entries where the parameters {self._names_of(parts)} have"
                f" {sum(padded)}. Do not freeze parameters in the middle of a step."
            )
        names = self._names_of(parts)
        if self.is_blocked:
            self._waits.update(names)
            return
        parameters = [part.sharded_param for part in parts]
        sizes = [local_of(parameter).numel() for parameter in parameters]
        places = [place[:size] for place, size in zip(flat.split(padded), sizes, strict=True)]
        for name, place, parameter in zip(names, places, parameters, strict=True):
            if name in self._waits and parameter.grad is not None:
                _keep_for_this_stream(accumulated := local_of(parameter.grad))
                place.add_(accumulated.reshape(-1))
                parameter.grad = None
        self._waits.difference_update(names)
        if not self._pending:
            self._begin()
        with self.traffic.timed("compress"):
            buffer = torch.cat(places)
            self._count_dense(buffer)
            pending = self._start(buffer, self._plan_of(parameters, sizes, buffer.dtype), set())
        complete([pending], self.traffic)
        torch._foreach_copy_(places, list(pending.result.split(sizes)))
        self._pending = [pending]

    def _names_of(self, parts: Iterable[Any]) -> list[str]:
        return [self.parameter_names[part.sharded_param] for part in parts]


def _keep_for_this_stream(tensor: Tensor) -> None:
    """FSDP lets go of memory of another stream while this one still has to read or write it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def count_inside(modules: Iterable[FSDPModule], link: Link) -> None:
    """Count the bytes of FSDP's gathers and reductions inside a replica."""
    for module in modules:
        for unit in _units_of(module):
            gather = getattr(unit._all_gather_comm, "collective", unit._all_gather_comm)
            scatter = getattr(unit._reduce_scatter_comm, "collective", unit._reduce_scatter_comm)
            module.set_custom_all_gather(_Counted(gather, link, all_gather_bytes))
            module.set_custom_reduce_scatter(_Counted(scatter, link, lambda size, ranks: size * (ranks - 1) // ranks))


class _Counted(AllGather, ReduceScatter):
    """A collective of FSDP that counts its bytes."""

    def __init__(self, collective: Any, link: Link, num_bytes: Any) -> None:
        self.collective, self._link, self._num_bytes = collective, link, num_bytes

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.collective.allocate(*args, **kwargs)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        size = input_tensor.numel() * input_tensor.element_size()
        self._link.count(self._num_bytes(size, self._link.size))
        return self.collective(output_tensor, input_tensor, *args, **kwargs)


def _units_of(module: FSDPModule) -> list[Any]:
    # Not public, but FSDP passes its hook a flat tensor without names.
    return list(module._get_fsdp_state()._fsdp_param_groups)
