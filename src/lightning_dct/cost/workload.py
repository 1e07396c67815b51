"""The tensors that are synchronised in a step, and the buckets of DistributedDataParallel."""

import pkgutil
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import (
    _DEFAULT_FIRST_BUCKET_BYTES,
    _compute_bucket_assignment_by_size,
)
from torch.nn.parallel import distributed as ddp
from torch.nn.parameter import is_lazy

from lightning_dct.activations.module import modules_of
from lightning_dct.compress.bucket_plan import real_numel
from lightning_dct.config import DCTConfig
from lightning_dct.embedding.sharded import ShardedEmbeddingBags
from lightning_dct.sync.buffers import buffers_of, statistics_of
from lightning_dct.sync.optimizer_clock import buckets_of
from lightning_dct.sync.setup import parameter_names

# DistributedDataParallel's limits: a small first bucket, which is sent early, then buckets of this
# size.
BUCKET_LIMITS = [
    _DEFAULT_FIRST_BUCKET_BYTES,
    getattr(ddp, "_DEFAULT_BUCKET_CAP_MB", 25) * 1024 * 1024,
]


@dataclass(frozen=True)
class Workload:
    """Tensors whose gradients are synchronised; only their sizes, dtypes and ``requires_grad``
    matter.
    """

    parameters: Mapping[str, Tensor]  # by name in the model's order, frozen ones included
    # Entries that are sent in another way or depend on the data, by the reason.
    not_counted: Mapping[str, int]
    sparse: Collection[
        str
    ] = ()  # those with sparse gradients: a dense exchange sends the rows that a batch looks up
    # Bytes of the running statistics of normalisation layers, and of all others.
    buffers: tuple[int, int] = (0, 0)

    @cached_property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """The names in each bucket, as DistributedDataParallel lays them out after its first step.

        It fills them in the order in which gradients become ready. Here that is the reverse of the
        order in which parameters are defined, which is right for models that use them in that
        order.
        """
        trained = [
            name
            for name, one in self.parameters.items()
            if one.requires_grad and name not in self.sparse
        ][::-1]
        if not trained:
            return ()
        assigned, _ = _compute_bucket_assignment_by_size(
            [self.parameters[name] for name in trained], BUCKET_LIMITS
        )
        return tuple(tuple(trained[index] for index in indices) for indices in assigned)

    def buckets_under(self, config: DCTConfig) -> Sequence[Sequence[str]]:
        """The names in each bucket: DistributedDataParallel's for gradients, or those of
        updates.
        """
        if config.compress == "gradients":
            return self.buckets
        trained = [
            (name, parameter)
            for name, parameter in self.parameters.items()
            if parameter.requires_grad
        ]
        return buckets_of(trained, config.local_steps if config.overlap_steps else 1)

    def sizes_under(self, config: DCTConfig) -> list[int]:
        """The entries of each tensor in these buckets."""
        return [
            real_numel(self.parameters[name])
            for bucket in self.buckets_under(config)
            for name in bucket
        ]


def one_tensor(entries: int) -> Workload:
    """A model of one large tensor in fp32."""
    return Workload({"parameters": nn.Parameter(torch.empty(entries, device="meta"))}, {})


def workload_of(module: nn.Module) -> Workload:
    """The tensors of a model; a ValueError if nothing of it is trained, or a size is not known
    yet.
    """
    embeddings = (
        part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)
    )
    sparse = {part.weight for part in embeddings if part.sparse}
    tables = list(modules_of(module, ShardedEmbeddingBags).values())
    not_counted: dict[str, int] = {}
    if tables:
        rows = sum(table.num_rows * table.embedding_dim for table in tables)
        not_counted["the batches decide which rows of ShardedEmbeddingBags are sent"] = rows
    sharded = {table.weight for table in tables}
    parameters = {name: one for one, name in parameter_names(module).items() if one not in sharded}
    for name, parameter in parameters.items():
        if is_lazy(parameter):
            raise ValueError(
                f"`--module`: the size of parameter {name!r} is not known before data have gone"
                " through the model. Give lazy layers their sizes"
            )
    rows_only = {name: one.numel() for name, one in parameters.items() if one in sparse}
    if rows_only:
        reason = (
            "gradients of Embedding(sparse=True) are sent uncompressed, for the rows that a batch"
            " looks up (their updates are counted)"
        )
        not_counted[reason] = sum(rows_only.values())
    if not any(parameter.requires_grad and parameter.numel() for parameter in parameters.values()):
        raise ValueError(
            f"`--module`: {type(module).__name__} has no parameter whose gradient is synchronised."
            " Name a module that makes its parameters when it is constructed or in"
            " `configure_model`, and that trains some of them."
        )
    buffers = buffers_of(module)
    statistics = statistics_of(module)
    averaged = sum(buffers[name].nbytes for name in statistics & buffers.keys())
    others = sum(buffer.nbytes for buffer in buffers.values()) - averaged
    return Workload(parameters, not_counted, rows_only, (averaged, others))


def load_module(path: str, keywords: Mapping[str, Any]) -> nn.Module:
    """Make a module from its import path, on the meta device where it can be: without memory for
    its parameters.

    ``path`` is ``package.module:Class`` of a module, or a function of the user's own that returns
    one. Nothing else is called, because a path on a command line may come from anywhere. What
    cannot be made is a ValueError.
    """
    try:
        made_by = pkgutil.resolve_name(path)
        if not _makes_modules(made_by):
            raise TypeError(
                "neither a class of torch.nn.Module nor a function in a Python file of yours"
            )

        def make() -> Any:
            made = made_by(**keywords)
            if callable(configure := getattr(made, "configure_model", None)):
                configure()
            return made

        try:
            with torch.device("meta"):
                module = make()
        except (NotImplementedError, RuntimeError):
            # Its constructor reads values, which the meta device does not have.
            module = make()
    # A user's module may raise anything.
    except Exception as error:
        raise ValueError(
            f"`--module {path}` cannot be made: {type(error).__name__}: {error}. Write it as"
            " package.module:Class, run this in the folder and the environment from which training"
            " starts, and give the constructor what it needs, as in `--arguments width=512"
            " layers=4`"
        ) from error
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"`--module {path}` must give a torch.nn.Module, not {type(module).__name__}"
        )
    return module


def _makes_modules(found: Any) -> bool:
    """Whether something is a class of modules, or a function in a file that was not installed."""
    if not isinstance(found, FunctionType):
        return isinstance(found, type) and issubclass(found, nn.Module)
    file = Path(found.__code__.co_filename).resolve()
    installed = {"site-packages", "dist-packages"}.intersection(file.parts)
    return (
        file.exists()
        and not installed
        and not file.is_relative_to(Path(sysconfig.get_path("stdlib")).resolve())
    )
