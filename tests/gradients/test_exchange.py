from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_dct import DCTConfig
from lightning_dct.gradients import GradientSynchronizer
from lightning_dct.gradients.exchange import all_gather_payload, all_reduce_mean, all_reduce_mean_sparse
from lightning_dct.traffic import Traffic


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """This process alone: the collectives are the real ones."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_all_gather_stacks_the_payloads(group: dist.ProcessGroup) -> None:
    traffic, payload = Traffic(), torch.arange(13, dtype=torch.uint8)
    work, gathered = all_gather_payload(payload, group, traffic)
    work.wait()
    assert gathered.shape == (1, 13)
    assert torch.equal(gathered[0], payload)
    assert traffic.totals.bytes_sent == 0  # nobody to send to


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_reduce_averages_in_place(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    buffer = torch.tensor([1.0, -2.0], dtype=dtype)
    all_reduce_mean(buffer, group, Traffic()).wait()
    assert buffer.tolist() == [1.0, -2.0]


def test_all_reduce_of_sparse_gradients_counts_them_alike(group: dist.ProcessGroup) -> None:
    traffic = Traffic()
    gradient = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 4), (5, 4), check_invariants=True)
    all_reduce_mean_sparse(gradient, group, traffic).wait()
    assert gradient.to_dense().sum() == 8.0
    assert (traffic.totals.entries_sent, traffic.totals.entries) == (8, 8)
    assert traffic.totals.bytes_sent == traffic.totals.bytes_dense == 0


class GroupOf:
    def __init__(self, size: int) -> None:
        self.size = lambda: size


def test_bytes_counted_for_more_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for collective in ("all_gather_single", "all_reduce"):
        monkeypatch.setattr(dist, collective, lambda *args, **kwargs: None)
    traffic = Traffic()
    all_gather_payload(torch.zeros(13, dtype=torch.uint8), GroupOf(4), traffic)  # type: ignore[arg-type]
    assert traffic.totals.bytes_sent == 3 * 13
    all_reduce_mean(torch.zeros(10, dtype=torch.float16), GroupOf(4), traffic)  # type: ignore[arg-type]
    assert traffic.totals.bytes_sent == 3 * 13 + 2 * 3 * 20 // 4
    sparse = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 4), (5, 4), check_invariants=True)
    all_reduce_mean_sparse(sparse, GroupOf(4), traffic)  # type: ignore[arg-type]
    assert traffic.totals.bytes_sent == 3 * 13 + 30 + 3 * (2 * 8 + 8 * 4)
    assert traffic.totals.bytes_dense == 3 * (2 * 8 + 8 * 4)


def test_ddp_takes_the_hook(group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 10)
    expected = torch.autograd.grad(model(torch.ones(3, 20)).sum(), list(model.parameters()))
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    synchronizer = GradientSynchronizer(DCTConfig(min_tensor_size=0), names, group, Traffic())
    wrapped.register_comm_hook(None, synchronizer.hook)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(torch.ones(3, 20)).sum().backward()
        assert synchronizer.synchronisations == step + 1
        assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
