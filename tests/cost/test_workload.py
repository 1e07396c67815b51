"""What is taken from a module: its buckets are DistributedDataParallel's, and what travels
otherwise is left out.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dct import DCTConfig, ShardedEmbeddingBags
from lightning_dct.cost.forecast import Forecast, describe, layout_of
from lightning_dct.cost.timing import Speed
from lightning_dct.cost.workload import load_module, one_tensor, workload_of


class Deep(nn.Module):
    """3.8 MB, so several buckets; parameters of two dtypes, frozen ones, and ones used twice."""

    def __init__(self, width: int = 300) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(10)))
        self.last = nn.Linear(width, 4, dtype=torch.float64)
        self.layers[3].requires_grad_(False)
        self.layers[5].weight = self.layers[4].weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(inputs).double())


def test_buckets_are_those_of_the_second_step(group: dist.ProcessGroup) -> None:
    model = Deep()
    names = {parameter: name for name, parameter in model.named_parameters()}
    wrapped = DistributedDataParallel(model)
    seen = []

    def look(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(tuple(names[parameter] for parameter in bucket.parameters()))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, look)
    for _ in range(2):
        seen.clear()
        wrapped(torch.randn(2, 300)).sum().backward()
    forecast = workload_of(load_module(f"{__name__}:Deep", {"width": 300})).buckets
    assert len(forecast) > 2
    assert set(map(frozenset, forecast)) == set(map(frozenset, seen))


def test_what_travels_otherwise_is_left_out() -> None:
    model = nn.ModuleDict(
        {
            "sparse": nn.Embedding(100, 4, sparse=True),
            "rows": ShardedEmbeddingBags([50, 30], embedding_dim=4),
            "dense": nn.Linear(7, 5),
        }
    )
    workload = workload_of(model)
    assert sum(workload.sizes_under(DCTConfig(compress="gradients"))) == 7 * 5 + 5
    assert sorted(workload.not_counted.values()) == [320, 400]
    assert any("sparse=True" in reason for reason in workload.not_counted)


@pytest.mark.parametrize(("compress", "names"), [("updates", {"weight"}), ("gradients", set())])
def test_updates_of_a_table_with_sparse_gradients_are_counted(
    compress: Any, names: set[str]
) -> None:
    """Of a model of nothing else, too: its plan is made."""
    config = DCTConfig(compress=compress, local_steps=1, density=0.1)
    workload = workload_of(nn.Embedding(900, 4, sparse=True))
    assert {name for bucket in workload.buckets_under(config) for name in bucket} == names
    forecast = Forecast(config, workload, layout_of(2, 2), 1e9, Speed(0.0, 0.0, 0.0, ""))
    assert int(forecast.row("ddp").step.sent.max()) == 0
    assert (int(forecast.row("all_gather").step.sent.max()) > 0) == bool(names)
    said = describe(forecast, [])
    assert said.startswith("3,600 parameters in 1 tensor" if names else "0 parameters in 0 tensors")
    assert ("leaves out embeddings with sparse gradients" in said) == bool(names)
    hierarchical = Forecast(config, workload, layout_of(4, 2), 1e9, Speed(0.0, 0.0, 0.0, ""))
    assert hierarchical.row("hierarchical").ratio == 0.0


def test_one_tensor_takes_no_memory() -> None:
    workload = one_tensor(10**12)
    assert sum(workload.sizes_under(DCTConfig())) == 10**12
    assert workload.buckets == (("parameters",),)


class LooksAtNumbers(nn.Module):
    """Cannot be made on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.largest = float(self.weight.detach().max())


class MadeLate(nn.Module):
    """As LightningModules that shard themselves are."""

    def configure_model(self) -> None:
        self.layer = nn.Linear(3, 3)


@pytest.mark.parametrize(("name", "entries"), [("LooksAtNumbers", 3), ("MadeLate", 12)])
def test_modules_that_are_made_in_other_ways(name: str, entries: int) -> None:
    workload = workload_of(load_module(f"{__name__}:{name}", {}))
    assert sum(workload.sizes_under(DCTConfig())) == entries
